// An exported model on ONNX Runtime: images in, boxes or classes out.
//
//     ppdist::Options options;
//     options.threads = 2;
//     ppdist::Predictor predictor("DIR", options);
//     for (const ppdist::Box& box : predictor.detect(cv::imread("image.jpg"))) ...
#pragma once

#include <filesystem>
#include <memory>
#include <vector>

#include <opencv2/core.hpp>

#include "nms.hpp"
#include "spec.hpp"

namespace ppdist {

struct Options {
    int threads = 1;    // CPU threads of one prediction
    bool int8 = false;  // the quantised file of the export
};

// Time of the last image, milliseconds.
struct Times {
    double before;  // resize, and pixels to numbers
    double model;
    double after;  // suppression, unless it is in the graph, and boxes to pixels of the image
};

// One image at a time; a thread of its own needs a Predictor of its own.
class Predictor {
public:
    // directory: holds infer.yml and the file it names.  Throws Error.
    explicit Predictor(const std::filesystem::path& directory, const Options& options = {});
    ~Predictor();

    // Boxes in pixels of the image, inside it, best first.
    // image: 8-bit BGR, any size, upright, as cv::imread gives it.
    std::vector<Box> detect(const cv::Mat& image);

    // The probability of each class, of a classifier.
    std::vector<float> classify(const cv::Mat& image);

    const Spec& spec() const { return spec_; }
    const Times& times() const { return times_; }

private:
    class Session;

    Spec spec_;
    Times times_{};
    std::unique_ptr<Session> session_;
};

}  // namespace ppdist
