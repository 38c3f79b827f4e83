// SHA-256 (FIPS 180-4) of a file.
#pragma once

#include <filesystem>
#include <string>

namespace ppdist {

// In hex.  Throws std::ios_base::failure where the file cannot be read.
std::string sha256_of(const std::filesystem::path& file);

}  // namespace ppdist
