#include "spec.hpp"

#include "sha256.hpp"

#include <fstream>

#include <nlohmann/json.hpp>

namespace ppdist {
namespace {

using nlohmann::json;

bool has(const json& section, const char* key) {
    return section.contains(key) && !section[key].is_null();
}

Resize resize_of(const std::string& mode) {
    if (mode == "stretch" || mode == "stretch_antialiased") return Resize::stretch;
    if (mode == "letterbox") return Resize::letterbox;
    if (mode == "centre_crop") return Resize::centre_crop;
    throw Error("resize.mode is '" + mode + "': expected stretch, letterbox or centre_crop");
}

Interpolation interpolation_of(const std::string& name) {
    if (name == "cubic") return Interpolation::cubic;
    if (name == "linear") return Interpolation::linear;
    if (name == "antialiased") return Interpolation::antialiased;
    throw Error("resize.interpolation is '" + name + "': expected cubic, linear or antialiased");
}

void require(const json& section, const char* key, const std::string& expected) {
    const auto found = section.at(key).get<std::string>();
    if (found != expected) {
        throw Error(std::string(key) + " is '" + found + "': this program knows " + expected);
    }
}

Nms nms_of(const json& section) {
    std::optional<float> overlap;
    if (has(section, "iou_threshold")) overlap = section.at("iou_threshold").get<float>();
    return {section.at("score_threshold"), overlap, section.at("candidates"), section.at("keep"),
            section.at("multi_label"), section.value("class_agnostic", false)};
}

Spec spec_of(const json& content, const std::filesystem::path& directory, bool int8) {
    if (content.at("version") != 1) throw Error("version is not 1: export with this version");
    const char* form = int8 ? "onnx_int8" : "onnx";
    if (!has(content, form)) {
        throw Error(int8 ? "holds no INT8 model; export with --format onnx --int8"
                         : "holds no ONNX model; export with --format onnx");
    }
    const json& file = content.at(form);
    const json& input = content.at("input");
    const json& resize = content.at("resize");
    require(input, "dtype", "float32");
    require(input, "layout", "BCHW");
    require(input, "colour", "rgb");

    Spec spec{};
    spec.classifies = content.at("task") == "classify";
    spec.model = directory / std::filesystem::u8path(file.at("files").at(0).get<std::string>());
    const std::string name = spec.model.filename().u8string();
    if (has(content, "sha256") && content.at("sha256").contains(name) &&
        content.at("sha256").at(name) != sha256_of(spec.model)) {
        throw Error("describes another " + name + " (its SHA-256 differs); copy the whole export "
                    "again, or take its sha256 out if you changed it on purpose");
    }
    spec.nms_in_graph = file.at("nms_in_graph");
    spec.input = input.at("name");
    for (const json& output : file.at("outputs")) spec.outputs.push_back(output.at("name"));
    const size_t expected = spec.classifies ? 1 : 2;
    if (spec.outputs.size() != expected) {
        throw Error(std::string(form) + ".outputs names " + std::to_string(spec.outputs.size()) +
                    " outputs: expected " + std::to_string(expected));
    }
    spec.height = input.at("size").at(0);
    spec.width = input.at("size").at(1);
    if (has(input, "normalised")) {
        const json& given = input.at("normalised");
        spec.normalisation = Normalisation{given.at("mean").get<std::array<float, 3>>(),
                                           given.at("std").get<std::array<float, 3>>()};
    }
    spec.resize = resize_of(resize.at("mode"));
    spec.interpolation = interpolation_of(resize.at("interpolation"));
    if (has(resize, "fill")) spec.fill = resize.at("fill").get<std::array<int, 3>>();
    if (!spec.classifies) spec.nms = nms_of(content.at("nms"));
    const char* const best = "best_f1_threshold";
    spec.threshold = has(content, best) ? content.at(best).get<float>() : 0.25f;
    spec.class_names = content.at("class_names").get<std::vector<std::string>>();
    return spec;
}

}  // namespace

Spec read_spec(const std::filesystem::path& directory, bool int8) {
    const auto file = directory / "infer.yml";
    std::ifstream stream(file);
    if (!stream) {
        throw Error(file.string() + ": cannot be read, so " + directory.string() +
                    " is not an exported model; make one with tools/export.py --format onnx");
    }
    try {
        return spec_of(json::parse(stream), directory, int8);
    } catch (const json::exception& error) {
        throw Error(file.string() + ": not as tools/export.py writes it: " + error.what() +
                    "; export again");
    } catch (const std::ios_base::failure& error) {
        throw Error(file.string() + ": the model that it names " + error.what() + "; export again");
    } catch (const Error& error) {
        throw Error(file.string() + ": " + error.what());
    }
}

}  // namespace ppdist
