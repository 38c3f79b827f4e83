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

// `length` rows, each a mean of `rows` under a triangle, as Pillow's bilinear has them.
cv::Mat averaged(const cv::Mat& rows, int length) {
    const double scale = static_cast<double>(rows.rows) / length, reach = std::max(1.0, scale);
    cv::Mat result(length, rows.cols, rows.type());
    const int width = rows.cols * rows.channels();
    std::vector<double> weights;
    for (int row = 0; row < length; ++row) {
        const double centre = (row + 0.5) * scale;
        const int first = std::max(0, static_cast<int>(centre - reach + 0.5));
        const int last = std::min(rows.rows, static_cast<int>(centre + reach + 0.5));
        weights.clear();
        double total = 0;
        for (int i = first; i < last; ++i) {
            weights.push_back(std::max(0.0, 1 - std::abs(i - centre + 0.5) * (1 / reach)));
            total += weights.back();
        }
        // Of 22 bits: their sums are exact.
        for (double& weight : weights) weight = std::floor(weight / total * 4194304 + 0.5) / 4194304;
        uchar* to = result.ptr<uchar>(row);
        for (int x = 0; x < width; ++x) {
            double sum = 0.5;
            for (int i = first; i < last; ++i) sum += weights[i - first] * rows.ptr<uchar>(i)[x];
            to[x] = static_cast<uchar>(sum);
        }
    }
    return result;
}

cv::Mat resized(const cv::Mat& image, const cv::Size& size, Interpolation interpolation) {
    cv::Mat result;
    if (interpolation != Interpolation::antialiased) {
        const bool cubic = interpolation == Interpolation::cubic;
        cv::resize(image, result, size, 0, 0, cubic ? cv::INTER_CUBIC : cv::INTER_LINEAR);
        return result;
    }
    cv::transpose(image, result);  // columns first, as deploy/python
    if (result.rows != size.width) result = averaged(result, size.width);
    cv::Mat upright;
    cv::transpose(result, upright);
    return upright.rows == size.height ? upright : averaged(upright, size.height);
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
        part = resized(part, placement.target.size(), spec.interpolation);
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
