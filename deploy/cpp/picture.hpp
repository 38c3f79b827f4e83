// How an image becomes the input of the model, and a box of the output a box of the image.
#pragma once

#include <vector>

#include <opencv2/core.hpp>

#include "nms.hpp"
#include "spec.hpp"

namespace ppdist {

// The part `source` of an image, in its pixels, is shown at `target` of the input, in its pixels.
struct Placement {
    cv::Rect source, target;
};

Placement placed(const cv::Size& image, const Spec& spec);

// image: 8-bit BGR, as cv::imread gives it.  Returns: [3, height, width], red first.
std::vector<float> input_of(const cv::Mat& image, const Placement& placement, const Spec& spec);

// Boxes in input pixels become boxes in pixels of the image, inside it.
void map_back(std::vector<Box>& boxes, const Placement& placement, const cv::Size& image);

}  // namespace ppdist
