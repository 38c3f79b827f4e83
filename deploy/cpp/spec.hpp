// infer.yml: all that is to be known about an exported model.
#pragma once

#include <array>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace ppdist {

// What the user can mend; its text says where, what was found and what to do.
struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

enum class Resize { stretch, letterbox, centre_crop };
enum class Interpolation { cubic, linear, antialiased };

// The graph takes (x / 255 - mean) / std of red, green and blue.
struct Normalisation {
    std::array<float, 3> mean, std;
};

// Non-maximum suppression.
struct Nms {
    float score_threshold;  // predictions must score more
    std::optional<float> iou_threshold;  // of two boxes that overlap more, the better stays;
                                         // none: nothing is suppressed, the best stay
    size_t candidates;      // best boxes of a class that enter
    size_t keep;            // best boxes of the image that leave
    bool multi_label;       // false: a prediction counts for its best class only
    bool class_agnostic;    // boxes suppress those of other classes, too
};

struct Spec {
    bool classifies;
    std::filesystem::path model;       // the ONNX file
    bool nms_in_graph;                 // outputs rows and count, else scores and boxes
    std::string input;                 // name of the one input
    std::vector<std::string> outputs;  // names
    int height, width;                 // of the input, pixels
    std::optional<Normalisation> normalisation;  // none: the graph takes 0..255
    Resize resize;
    Interpolation interpolation;
    std::array<int, 3> fill;   // letterbox: red, green and blue beside the image
    std::optional<Nms> nms;    // none: of a classifier
    float threshold;           // lowest score of a box where nobody asks for another
    std::vector<std::string> class_names;
};

// Reads DIR/infer.yml, which is JSON.  int8: take the quantised file.  Throws Error, also where the
// model's file is not the one that infer.yml describes.
Spec read_spec(const std::filesystem::path& directory, bool int8 = false);

}  // namespace ppdist
