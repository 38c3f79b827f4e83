#include "predictor.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <string>

#include <onnxruntime_cxx_api.h>

#include "picture.hpp"

namespace ppdist {
namespace {

double now() {
    using namespace std::chrono;
    return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

void require_picture(const cv::Mat& image) {
    if (image.empty() || image.type() != CV_8UC3) {
        throw Error("an image is empty or not 8-bit BGR: read it with cv::imread");
    }
}

std::string text_of(const std::vector<int64_t>& shape) {
    std::string text = "[";
    for (const int64_t side : shape) {
        if (text.size() > 1) text += ", ";
        text += side < 0 ? "any" : std::to_string(side);
    }
    return text + "]";
}

}  // namespace

// The graph, with one image at a time.
class Predictor::Session {
public:
    Session(const Spec& spec, const Options& options) : spec_(spec) {
        if (options.threads < 1) {
            throw Error("threads is " + std::to_string(options.threads) + ": expected 1 or more");
        }
        if (!std::filesystem::is_regular_file(spec.model)) {
            throw Error(spec.model.string() + ": named by infer.yml but not there; export again");
        }
        Ort::SessionOptions settings;
        settings.SetIntraOpNumThreads(options.threads);
        settings.SetGraphOptimizationLevel(ORT_ENABLE_ALL);
        try {
            session_ = Ort::Session(environment_, spec.model.c_str(), settings);
        } catch (const Ort::Exception& error) {
            throw Error(spec.model.string() + ": ONNX Runtime cannot load it: " + error.what() +
                        "; export again, or take a newer ONNX Runtime");
        }
        const auto type = session_.GetInputTypeInfo(0);
        require_shape(type.GetTensorTypeAndShapeInfo().GetShape());
    }

    std::vector<Ort::Value> run(std::vector<float>& input) {
        const std::array<int64_t, 4> shape{1, 3, spec_.height, spec_.width};
        const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
        const auto image = Ort::Value::CreateTensor<float>(memory, input.data(), input.size(),
                                                           shape.data(), shape.size());
        const char* input_name = spec_.input.c_str();
        std::vector<const char*> output_names;
        for (const std::string& name : spec_.outputs) output_names.push_back(name.c_str());
        try {
            return session_.Run(Ort::RunOptions{nullptr}, &input_name, &image, 1,
                                output_names.data(), output_names.size());
        } catch (const Ort::Exception& error) {
            throw Error(spec_.model.string() + ": ONNX Runtime: " + error.what());
        }
    }

private:
    void require_shape(const std::vector<int64_t>& found) const {
        const std::vector<int64_t> given{1, 3, spec_.height, spec_.width};
        const bool fits = std::equal(
            found.begin(), found.end(), given.begin(), given.end(),
            [](int64_t side, int64_t wanted) { return side < 0 || side == wanted; });
        if (!fits) {
            throw Error(spec_.model.string() + ": takes images " + text_of(found) +
                        ", not one image " + text_of(given) +
                        "; export with a batch of 1 or of any size");
        }
    }

    const Spec& spec_;
    // Its warnings about unused constants of converted graphs are noise.
    Ort::Env environment_{ORT_LOGGING_LEVEL_ERROR};
    Ort::Session session_{nullptr};
};

Predictor::Predictor(const std::filesystem::path& directory, const Options& options)
    : spec_(read_spec(directory, options.int8)),
      session_(std::make_unique<Session>(spec_, options)) {}

Predictor::~Predictor() = default;

std::vector<Box> Predictor::detect(const cv::Mat& image) {
    if (spec_.classifies) throw Error(spec_.model.string() + ": a classifier; use classify");
    require_picture(image);
    const double start = now();
    const Placement placement = placed(image.size(), spec_);
    auto input = input_of(image, placement, spec_);
    const double prepared = now();
    const auto outputs = session_->run(input);
    const double ran = now();

    const auto* first = outputs[0].GetTensorData<float>();
    const auto shape = outputs[0].GetTensorTypeAndShapeInfo().GetShape();
    std::vector<Box> boxes;
    if (spec_.nms_in_graph) {  // rows [R, 6]; count, the second output, is R for one image
        for (const float* row = first; row < first + 6 * shape.at(0); row += 6) {
            boxes.push_back({static_cast<int>(row[0]), row[1], row[2], row[3], row[4], row[5]});
        }
    } else {  // scores [1, N, C] and boxes [1, N, 4]
        boxes = suppress(first, outputs[1].GetTensorData<float>(), shape.at(1), shape.at(2),
                         *spec_.nms);
    }
    map_back(boxes, placement, image.size());
    std::stable_sort(boxes.begin(), boxes.end(),
                     [](const Box& one, const Box& other) { return one.score > other.score; });
    times_ = {prepared - start, ran - prepared, now() - ran};
    return boxes;
}

std::vector<float> Predictor::classify(const cv::Mat& image) {
    if (!spec_.classifies) throw Error(spec_.model.string() + ": a detector; use detect");
    require_picture(image);
    const double start = now();
    auto input = input_of(image, placed(image.size(), spec_), spec_);
    const double prepared = now();
    const auto outputs = session_->run(input);
    times_ = {prepared - start, now() - prepared, 0};
    const auto* probabilities = outputs[0].GetTensorData<float>();
    return {probabilities, probabilities + spec_.class_names.size()};
}

}  // namespace ppdist
