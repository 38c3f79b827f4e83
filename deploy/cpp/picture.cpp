#include "picture.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include <opencv2/imgproc.hpp>

namespace ppdist {
namespace {

int rounded(double value, int most) {
    return std::clamp(static_cast<int>(std::floor(value + 0.5)), 1, most);
}

float mapped(float value, int start, int length, int extent) {
    const auto scale = static_cast<float>(static_cast<double>(extent) / length);
    return std::clamp((value - start) * scale, 0.0f, static_cast<float>(extent));
}

}  // namespace

Placement placed(const cv::Size& image, const Spec& spec) {
    const cv::Rect all_of_image({0, 0}, image), all_of_input(0, 0, spec.width, spec.height);
    const double down = static_cast<double>(spec.height) / image.height;
    const double across = static_cast<double>(spec.width) / image.width;
    if (spec.resize == Resize::letterbox) {
        const double scale = std::min(down, across);
        const int tall = rounded(image.height * scale, spec.height);
        const int wide = rounded(image.width * scale, spec.width);
        return {all_of_image,
                {(spec.width - wide) / 2, (spec.height - tall) / 2, wide, tall}};
    }
    if (spec.resize == Resize::centre_crop) {
        const double scale = std::min(static_cast<double>(image.height) / spec.height,
                                      static_cast<double>(image.width) / spec.width);
        const int tall = rounded(spec.height * scale, image.height);
        const int wide = rounded(spec.width * scale, image.width);
        return {{(image.width - wide) / 2, (image.height - tall) / 2, wide, tall}, all_of_input};
    }
    return {all_of_image, all_of_input};
}

std::vector<float> input_of(const cv::Mat& image, const Placement& placement, const Spec& spec) {
    cv::Mat part = image(placement.source);
    if (part.size() != placement.target.size()) {
        cv::Mat resized;
        cv::resize(part, resized, placement.target.size(), 0, 0,
                   spec.cubic ? cv::INTER_CUBIC : cv::INTER_LINEAR);
        part = resized;
    }
    std::vector<float> input(size_t{3} * spec.height * spec.width);
    for (int channel = 0; channel < 3; ++channel) {
        // One look-up for each of the 256 values of a pixel.
        std::array<float, 256> value{};
        for (int i = 0; i < 256; ++i) {
            const auto& how = spec.normalisation;
            value[i] = how ? (i / 255.0f - how->mean[channel]) / how->std[channel] : i;
        }
        cv::Mat plane(spec.height, spec.width, CV_32F,
                      input.data() + size_t(channel) * spec.height * spec.width);
        if (part.size() != plane.size()) plane.setTo(value[spec.fill[channel]]);
        for (int y = 0; y < part.rows; ++y) {
            const uchar* from = part.ptr<uchar>(y) + (2 - channel);  // BGR to RGB
            float* to = plane.ptr<float>(placement.target.y + y) + placement.target.x;
            for (int x = 0; x < part.cols; ++x) to[x] = value[from[3 * x]];
        }
    }
    return input;
}

void map_back(std::vector<Box>& boxes, const Placement& placement, const cv::Size& image) {
    const cv::Rect& at = placement.target;
    for (Box& box : boxes) {
        box.x1 = mapped(box.x1, at.x, at.width, image.width);
        box.x2 = mapped(box.x2, at.x, at.width, image.width);
        box.y1 = mapped(box.y1, at.y, at.height, image.height);
        box.y2 = mapped(box.y2, at.y, at.height, image.height);
    }
}

}  // namespace ppdist
