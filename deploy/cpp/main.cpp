// predict --model DIR --source IMAGE|DIR [--out DIR] [--threshold S] [--threads N] [--int8]
//
// One line of JSON for each image on standard output; with --out its picture with the boxes drawn.
// Exit code: 0 done; 2 the input is wrong, with one message; images that cannot be read are
// skipped with a message, and are an error only where none can be read.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <numeric>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>
#include <opencv2/imgcodecs.hpp>
#include <opencv2/imgproc.hpp>

#include "predictor.hpp"

namespace fs = std::filesystem;
using nlohmann::ordered_json;
using ppdist::Error;

namespace {

const char* const usage =
    "usage: predict --model DIR --source IMAGE|DIR [--out DIR] [--threshold S] [--threads N] "
    "[--int8]";

struct Arguments {
    fs::path model, source, out;
    std::optional<float> threshold;  // none: the model's own
    ppdist::Options options;
};

template <typename Number>
Number number(const std::string& name, const std::string& text) {
    std::istringstream stream(text);
    Number value{};
    if (!(stream >> value) || !stream.eof()) {
        throw Error(name + " " + text + ": expected a number");
    }
    return value;
}

Arguments parse(const std::vector<std::string>& words) {
    Arguments arguments;
    for (size_t i = 0; i < words.size(); ++i) {
        const std::string& name = words[i];
        const auto value = [&]() -> const std::string& {
            if (i + 1 == words.size()) throw Error(name + ": a value is missing\n" + usage);
            return words[++i];
        };
        if (name == "--model") arguments.model = value();
        else if (name == "--source") arguments.source = value();
        else if (name == "--out") arguments.out = value();
        else if (name == "--threshold") arguments.threshold = number<float>(name, value());
        else if (name == "--threads") arguments.options.threads = number<int>(name, value());
        else if (name == "--int8") arguments.options.int8 = true;
        else throw Error(name + ": not an option\n" + usage);
    }
    if (arguments.model.empty() || arguments.source.empty()) {
        throw Error(std::string("give --model and --source\n") + usage);
    }
    if (arguments.threshold && !(*arguments.threshold >= 0 && *arguments.threshold <= 1)) {
        throw Error("--threshold " + std::to_string(*arguments.threshold) + ": expected 0..1");
    }
    return arguments;
}

bool is_image(const fs::path& file) {
    static const std::vector<std::string> suffixes{".jpg",  ".jpeg", ".jpe", ".jfif", ".mpo",
                                                   ".png",  ".bmp",  ".webp", ".tif", ".tiff"};
    std::string suffix = file.extension().string();
    std::transform(suffix.begin(), suffix.end(), suffix.begin(), ::tolower);
    const bool hidden = file.filename().string().front() == '.';
    return !hidden && std::count(suffixes.begin(), suffixes.end(), suffix) > 0;
}

// The file, or all images of the folder and of those in it, but not of `out`, by name.
std::vector<fs::path> images_of(const fs::path& source, const fs::path& out) {
    if (fs::is_regular_file(source)) return {source};
    if (!fs::is_directory(source)) throw Error(source.string() + ": no such file or folder");
    std::vector<fs::path> files;
    for (fs::recursive_directory_iterator entry(source), end; entry != end; ++entry) {
        const bool hidden = entry->path().filename().string().front() == '.';  // .ipynb_checkpoints
        const bool results = fs::exists(out) && entry->is_directory() && fs::equivalent(*entry, out);
        if (entry->is_directory() && (hidden || results)) {
            entry.disable_recursion_pending();
        } else if (entry->is_regular_file() && is_image(*entry)) {
            files.push_back(*entry);
        }
    }
    if (files.empty()) throw Error(source.string() + ": no image in this folder");
    std::sort(files.begin(), files.end());
    return files;
}

void draw(cv::Mat& image, const std::vector<ppdist::Box>& boxes, const ppdist::Spec& spec) {
    for (const ppdist::Box& box : boxes) {
        const int turn = box.label * 67 % 180;  // a hue for each class, OpenCV's half degrees
        cv::Mat colour(1, 1, CV_8UC3, cv::Scalar(turn, 200, 230));
        cv::cvtColor(colour, colour, cv::COLOR_HSV2BGR);
        const cv::Scalar paint(colour.at<cv::Vec3b>(0, 0));
        char score[16];
        std::snprintf(score, sizeof score, " %.2f", box.score);
        const cv::Point from(cvRound(box.x1), cvRound(box.y1));
        const cv::Point to(cvRound(box.x2), cvRound(box.y2));
        cv::rectangle(image, from, to, paint, 2);
        cv::putText(image, spec.class_names.at(box.label) + score, from + cv::Point(2, 12),
                    cv::FONT_HERSHEY_SIMPLEX, 0.45, paint, 1, cv::LINE_AA);
    }
}

void write_picture(const cv::Mat& image, const fs::path& file) {
    fs::create_directories(file.parent_path());
    std::string suffix = file.extension().string();
    std::transform(suffix.begin(), suffix.end(), suffix.begin(), ::tolower);
    const bool other_jpeg = suffix == ".jfif" || suffix == ".mpo";  // which OpenCV does not know
    std::vector<unsigned char> content;
    cv::imencode(other_jpeg ? ".jpg" : suffix, image, content);
    std::ofstream stream(file, std::ios::binary);
    stream.write(reinterpret_cast<const char*>(content.data()), content.size());
    if (!stream.flush()) throw Error(file.string() + ": cannot be written");
}

// To five decimals.
double rounded(float value) { return std::round(value * 1e5) / 1e5; }

ordered_json objects_of(const std::vector<ppdist::Box>& boxes, const ppdist::Spec& spec) {
    auto objects = ordered_json::array();
    for (const ppdist::Box& box : boxes) {
        objects.push_back({{"class", spec.class_names.at(box.label)},
                           {"score", rounded(box.score)},
                           {"box", {rounded(box.x1), rounded(box.y1), rounded(box.x2),
                                    rounded(box.y2)}}});
    }
    return objects;
}

// The five surest classes.
ordered_json classes_of(const std::vector<float>& probabilities, const ppdist::Spec& spec) {
    std::vector<size_t> order(probabilities.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](size_t one, size_t other) {
        return probabilities[one] > probabilities[other];
    });
    auto best = ordered_json::array();
    for (size_t i = 0; i < std::min<size_t>(5, order.size()); ++i) {
        best.push_back({{"class", spec.class_names[order[i]]},
                        {"score", rounded(probabilities[order[i]])}});
    }
    return best;
}

// What the model finds in an image; with `out` it is drawn there, too.
ordered_json look_at(cv::Mat& image, ppdist::Predictor& predictor, float threshold,
                     const fs::path& out) {
    const ppdist::Spec& spec = predictor.spec();
    if (spec.classifies) return {{"best", classes_of(predictor.classify(image), spec)}};
    auto boxes = predictor.detect(image);
    boxes.erase(std::find_if(boxes.begin(), boxes.end(),
                             [&](const ppdist::Box& box) { return box.score < threshold; }),
                boxes.end());
    if (!out.empty()) {
        draw(image, boxes, spec);
        write_picture(image, out);
    }
    return {{"objects", objects_of(boxes, spec)}};
}

double median(std::vector<double> values) {
    std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
    return values[values.size() / 2];
}

// Whether pictures written to `out` could replace those of `source`.
bool overwrites(const fs::path& out, const fs::path& source) {
    if (!fs::exists(out)) return false;
    const fs::path to = fs::canonical(out);
    if (!fs::is_directory(source)) return to == fs::canonical(fs::absolute(source).parent_path());
    return *fs::canonical(source).lexically_relative(to).begin() != "..";  // the same, or above it
}

void run(const Arguments& arguments) {
    const auto files = images_of(arguments.source, arguments.out);
    const bool folder = fs::is_directory(arguments.source);
    const fs::path root = folder ? arguments.source : arguments.source.parent_path();
    if (overwrites(arguments.out, arguments.source)) {
        throw Error("--out " + arguments.out.string() + ": the pictures of --source are there, or "
                    "below, and could be overwritten; choose another folder");
    }
    ppdist::Predictor predictor(arguments.model, arguments.options);
    std::vector<double> before, model, after;
    for (const fs::path& file : files) {
        cv::Mat image = cv::imread(file.string(), cv::IMREAD_COLOR);
        if (image.empty()) {
            std::cerr << file.string() << ": not an image, or damaged; skipped\n";
            continue;
        }
        const fs::path name = file.lexically_relative(root.empty() ? "." : root);
        const fs::path out = arguments.out.empty() ? fs::path() : arguments.out / name;
        ordered_json line{{"file", (root.empty() ? file : name).string()},
                          {"width", image.cols},
                          {"height", image.rows}};
        const float threshold = arguments.threshold.value_or(predictor.spec().threshold);
        line.update(look_at(image, predictor, threshold, out));
        std::cout << line.dump(-1, ' ', false, ordered_json::error_handler_t::replace) << '\n';
        before.push_back(predictor.times().before);
        model.push_back(predictor.times().model);
        after.push_back(predictor.times().after);
    }
    if (model.empty()) throw Error(arguments.source.string() + ": no image could be read");
    std::fprintf(stderr,
                 "%zu images; median of one: before %.2f ms, model %.2f ms, after %.2f ms\n",
                 model.size(), median(before), median(model), median(after));
}

}  // namespace

int main(int count, char** words) {
    const std::vector<std::string> given(words + 1, words + count);
    if (std::count(given.begin(), given.end(), "--help") > 0) {
        std::cout << usage << '\n';
        return 0;
    }
    try {
        run(parse(given));
        return 0;
    } catch (const Error& error) {
        std::cerr << "error: " << error.what() << '\n';
    } catch (const fs::filesystem_error& error) {
        std::cerr << "error: " << error.what() << '\n';
    } catch (const std::exception& error) {
        std::cerr << "unexpected: " << error.what() << '\n';
        return 1;
    }
    return 2;
}
