// Scores and boxes of all predictions -> the few that stay.
#pragma once

#include <cstddef>
#include <vector>

#include "spec.hpp"

namespace ppdist {

struct Box {
    int label;  // index of the class
    float score;  // 0..1
    float x1, y1, x2, y2;  // pixels: of the input, or of the image
};

// Non-maximum suppression of one image, within each class or (class_agnostic) of all together; or
// without a threshold the best of all.
//
// scores: [predictions, classes], 0..1; boxes: [predictions, 4], x1 y1 x2 y2.
// Returns: best first; of equal scores those of a smaller class (class_agnostic: the first prediction).
std::vector<Box> suppress(const float* scores, const float* boxes, size_t predictions,
                          size_t classes, const Nms& nms);

}  // namespace ppdist
