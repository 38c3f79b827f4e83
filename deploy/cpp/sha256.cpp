#include "sha256.hpp"

#include <array>
#include <cstdint>
#include <fstream>

namespace ppdist {
namespace {

constexpr size_t block_bytes = 64;

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes (section 4.2.2).
constexpr std::array<uint32_t, 64> constants = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

uint32_t rotated(uint32_t word, int bits) { return word >> bits | word << (32 - bits); }

// Section 6.2.2, steps 1 to 4.
void add_block(std::array<uint32_t, 8>& state, const unsigned char* block) {
    std::array<uint32_t, 64> words{};
    for (size_t t = 0; t < 16; ++t) {
        for (size_t byte = 0; byte < 4; ++byte) words[t] = words[t] << 8 | block[4 * t + byte];
    }
    for (size_t t = 16; t < 64; ++t) {
        const uint32_t near = words[t - 2], far = words[t - 15];
        words[t] = words[t - 16] + words[t - 7] +
                   (rotated(far, 7) ^ rotated(far, 18) ^ far >> 3) +
                   (rotated(near, 17) ^ rotated(near, 19) ^ near >> 10);
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (size_t t = 0; t < 64; ++t) {
        const uint32_t first = h + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) +
                               ((e & f) ^ (~e & g)) + constants[t] + words[t];
        const uint32_t second = (rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) +
                                ((a & b) ^ (a & c) ^ (b & c));
        h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
    }
    const std::array<uint32_t, 8> found = {a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < 8; ++i) state[i] += found[i];
}

}  // namespace

std::string sha256_of(const std::filesystem::path& file) {
    std::ifstream stream;
    stream.exceptions(std::ios::badbit);
    stream.open(file, std::ios::binary);
    if (!stream) throw std::ios_base::failure("cannot be opened");
    // Of the square roots of the first 8 primes (section 5.3.3).
    std::array<uint32_t, 8> state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                     0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::array<unsigned char, 2 * block_bytes> rest{};  // the last block, and its padding
    uint64_t bytes = 0;
    size_t left = 0;
    do {
        stream.read(reinterpret_cast<char*>(rest.data()), block_bytes);
        left = static_cast<size_t>(stream.gcount());
        bytes += left;
        if (left == block_bytes) add_block(state, rest.data());
    } while (left == block_bytes);
    // Section 5.1.1: a bit, zeros, and the length in bits, to a whole number of blocks.
    const size_t end = left < block_bytes - 8 ? block_bytes : 2 * block_bytes;
    for (size_t place = left; place < end; ++place) rest[place] = 0;
    rest[left] = 0x80;
    for (size_t byte = 0; byte < 8; ++byte) {
        rest[end - 1 - byte] = static_cast<unsigned char>(8 * bytes >> 8 * byte);
    }
    for (size_t place = 0; place < end; place += block_bytes) add_block(state, &rest[place]);
    constexpr char digits[] = "0123456789abcdef";
    std::string hex;
    for (const uint32_t word : state) {
        for (int shift = 28; shift >= 0; shift -= 4) hex += digits[word >> shift & 15];
    }
    return hex;
}

}  // namespace ppdist
