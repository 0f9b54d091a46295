// Feeds a libFuzzer target without libFuzzer: starts from inputs that pass the checks, and changes them at random, from a fixed seed.
// Usage: fuzz_segment [rounds [seed]], or files to run once each.
#include <fcntl.h>
#include <sys/stat.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "check.h"
#include "ddpcomm/shared_memory_header.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using Bytes = std::vector<std::uint8_t>;

template <class T>
void add(Bytes& bytes, const T& value) {
    const auto* begin = reinterpret_cast<const std::uint8_t*>(&value);
    bytes.insert(bytes.end(), begin, begin + sizeof(value));
}

std::vector<Bytes> sound_inputs() {
    using namespace ddpcomm;
    const std::uint64_t capacity = 1u << 24;
    SegmentToken token;
    token.fill(9);
    Bytes header{0}, file{1}, own{2}, staged{2}, large{3}, small{3};
    add(header, capacity);
    add(header, token);
    add(header, make_header(capacity, token));
    add(file, mode_t{S_IFREG | 0600});
    add(file, uid_t{7});
    add(file, std::int64_t{1} << 24);
    add(file, int{F_SEAL_SHRINK | F_SEAL_GROW});
    add(file, capacity);
    add(file, uid_t{7});
    for (Bytes* bytes : {&own, &staged}) {
        add(*bytes, std::uint64_t{1000});
        add(*bytes, std::uint8_t{4});
        add(*bytes, std::uint8_t{3});
        add(*bytes, std::uint8_t{bytes == &staged});
        add(*bytes, std::uint64_t{4096});
        add(*bytes, std::uint8_t{2});
        add(*bytes, std::array<std::uint64_t, kStagingBuffers>{1u << 20, 2u << 20});
        add(*bytes, capacity);
    }
    add(large, std::int64_t{1} << 40);
    add(large, std::uint16_t{0});
    for (std::int64_t i = 0; i < 4; ++i) {
        add(large, std::int64_t{100});
        add(large, i * 128);
    }
    add(small, std::int64_t{290});
    add(small, std::uint8_t{0});
    add(small, std::uint8_t{1});
    for (int i = 0; i < 4; ++i) {
        add(small, std::int8_t{50});
        add(small, static_cast<std::int16_t>(i * 64));
    }
    return {header, file, own, staged, large, small};
}

void change(Bytes& bytes, Generator& generator) {
    constexpr std::uint64_t kOdd[] = {
        0, 1, ~std::uint64_t{0}, std::uint64_t{1} << 63, (std::uint64_t{1} << 63) - 1, std::uint64_t{1} << 32, 4096};
    for (std::size_t changes = below(generator, 4); changes > 0 && bytes.size() > 1; --changes) {
        const std::size_t at = 1 + below(generator, bytes.size() - 1);
        switch (below(generator, 6)) {
            case 0: bytes[at] = static_cast<std::uint8_t>(generator()); break;
            case 1: bytes[at] ^= static_cast<std::uint8_t>(1u << below(generator, 8)); break;
            case 2: {
                const std::uint64_t value = kOdd[below(generator, std::size(kOdd))];
                std::memcpy(bytes.data() + at, &value, std::min(sizeof(value), bytes.size() - at));
                break;
            }
            case 3: bytes.resize(at); break;
            case 4: bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at), static_cast<std::uint8_t>(generator())); break;
            default: bytes[at] = static_cast<std::uint8_t>(bytes[at] + 1); break;
        }
    }
}

}  // namespace

int main(int count, char** arguments) {
    if (count > 1 && std::strspn(arguments[1], "0123456789") != std::strlen(arguments[1])) {
        for (int i = 1; i < count; ++i) {
            std::ifstream stream(arguments[i], std::ios::binary);
            const Bytes bytes((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
            LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
        }
        return 0;
    }
    const unsigned long rounds = count > 1 ? std::stoul(arguments[1]) : 200000;
    Generator generator(count > 2 ? std::stoull(arguments[2]) : 1);
    const std::vector<Bytes> sound = sound_inputs();
    for (unsigned long i = 0; i < rounds; ++i) {
        Bytes bytes = sound[below(generator, sound.size())];
        change(bytes, generator);
        LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
    }
    std::printf("fuzz_segment: %lu inputs passed\n", rounds);
}
