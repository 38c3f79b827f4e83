#include "nms.hpp"

#include <algorithm>

namespace ppdist {
namespace {

bool better(const Box& one, const Box& other) { return one.score > other.score; }

float area(const Box& box) {
    return box.x2 < box.x1 || box.y2 < box.y1 ? 0 : (box.x2 - box.x1) * (box.y2 - box.y1);
}

// Intersection over union; of two boxes without area it is not a number.
float overlap(const Box& one, const Box& other) {
    const float wide = std::min(one.x2, other.x2) - std::max(one.x1, other.x1);
    const float tall = std::min(one.y2, other.y2) - std::max(one.y1, other.y1);
    if (wide < 0 || tall < 0) return 0;
    const float shared = wide * tall;
    return shared / (area(one) + area(other) - shared);
}

// The predictions that score, in the groups that compete: classes, or one of all.
std::vector<std::vector<Box>> groups_of(const float* scores, const float* boxes,
                                        size_t predictions, size_t classes, const Nms& nms) {
    const bool agnostic = nms.class_agnostic && nms.iou_threshold;
    std::vector<std::vector<Box>> found(agnostic ? 1 : classes);
    for (size_t n = 0; n < predictions; ++n) {
        const float *row = scores + n * classes, *best = std::max_element(row, row + classes);
        if (!(*best > nms.score_threshold)) continue;
        const float* box = boxes + 4 * n;
        for (size_t label = 0; label < classes; ++label) {
            const bool counts = (nms.multi_label && !agnostic) || row + label == best;
            if (!counts || !(row[label] > nms.score_threshold)) continue;
            found[agnostic ? 0 : label].push_back(
                {static_cast<int>(label), row[label], box[0], box[1], box[2], box[3]});
        }
    }
    return found;
}

}  // namespace

std::vector<Box> suppress(const float* scores, const float* boxes, size_t predictions,
                          size_t classes, const Nms& nms) {
    std::vector<Box> kept;
    for (auto& found : groups_of(scores, boxes, predictions, classes, nms)) {
        if (!nms.iou_threshold) {
            kept.insert(kept.end(), found.begin(), found.end());
            continue;
        }
        std::stable_sort(found.begin(), found.end(), better);
        if (found.size() > nms.candidates) found.resize(nms.candidates);
        const auto first = static_cast<std::ptrdiff_t>(kept.size());
        for (const Box& box : found) {
            const bool stays = std::all_of(kept.begin() + first, kept.end(), [&](const Box& other) {
                return overlap(box, other) <= *nms.iou_threshold;  // false where not a number
            });
            if (stays) kept.push_back(box);
        }
    }
    std::stable_sort(kept.begin(), kept.end(), better);
    if (kept.size() > nms.keep) kept.resize(nms.keep);
    return kept;
}

}  // namespace ppdist
