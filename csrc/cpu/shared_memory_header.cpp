#if defined(__linux__)

#include "ddpcomm/shared_memory_header.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cstring>

namespace ddpcomm {
namespace {

constexpr std::array<char, 8> kMagic = {'d', 'd', 'p', 'c', 'o', 'm', 'm', '\n'};
constexpr std::uint32_t kVersion = 1;

std::string differs(const char* what, std::uint64_t found, std::uint64_t expected) {
    return std::string("its ") + what + " is " + std::to_string(found) + ", not " + std::to_string(expected);
}

std::string octal(mode_t mode) {
    std::string digits;
    for (int shift = 9; shift >= 0; shift -= 3) digits += static_cast<char>('0' + ((mode >> shift) & 7));
    return digits;
}

// Whether `bytes` bytes from `offset` on lie behind the control blocks and within the segment. Nothing here can overflow.
bool fits(std::uint64_t offset, std::uint64_t bytes, std::uint64_t capacity) {
    return offset >= kReservedBytes && offset <= capacity && bytes <= capacity - offset;
}

}  // namespace

SegmentHeader make_header(std::uint64_t capacity, const SegmentToken& token) {
    return {kMagic, kVersion, kChannels, kHeaderBytes, sizeof(ControlBlock), capacity, token};
}

std::string check_capacity(std::uint64_t capacity) {
    if (capacity < kReservedBytes) return differs("size", capacity, kReservedBytes) + " bytes or more";
    if (capacity > kLargestCapacity) return differs("size", capacity, kLargestCapacity) + " bytes or less";
    return "";
}

std::string check_file(const SegmentFile& file, std::uint64_t capacity, uid_t user) {
    if (!S_ISREG(file.mode)) return "it is not memory but another kind of file";
    if (file.owner != user) return differs("owner", file.owner, user) + ", the user that this process runs as";
    if ((file.mode & 07777) != (S_IRUSR | S_IWUSR)) return "its mode is " + octal(file.mode) + ", not 0600";
    const std::string wrong = check_capacity(capacity);
    if (!wrong.empty()) return wrong;
    if (file.bytes < 0 || static_cast<std::uint64_t>(file.bytes) != capacity) {
        return "it has " + std::to_string(file.bytes) + " bytes, not the " + std::to_string(capacity) + " that its maker told of";
    }
    constexpr int needed = F_SEAL_SHRINK | F_SEAL_GROW;
    if (file.seals < 0 || (file.seals & needed) != needed) return "it could be shrunk or grown while it is in use";
    return "";
}

std::string check_header(const void* bytes, std::size_t length, std::uint64_t capacity, const SegmentToken& token) {
    if (length < sizeof(SegmentHeader)) return differs("header's length", length, sizeof(SegmentHeader));
    SegmentHeader header;
    std::memcpy(&header, bytes, sizeof(header));  // once: its maker could change it meanwhile
    if (header.magic != kMagic) return "it does not begin as a segment of ddpcomm does";
    if (header.version != kVersion) return differs("version", header.version, kVersion) + "; all ranks need the same ddpcomm";
    if (header.header_bytes != kHeaderBytes) return differs("header's size", header.header_bytes, kHeaderBytes);
    if (header.channels != kChannels) return differs("number of channels", header.channels, kChannels);
    if (header.control_bytes != sizeof(ControlBlock)) return differs("control block's size", header.control_bytes, sizeof(ControlBlock));
    if (header.capacity != capacity) return differs("header's capacity", header.capacity, capacity);
    if (header.token != token) return "its token is not the one that its maker told of: it is another run's segment";
    return check_capacity(capacity);
}

bool lies_within(const DataRange& range, const std::array<std::uint64_t, kStagingBuffers>& offsets, std::uint64_t capacity) {
    if (range.numel == 0) return true;
    if (range.staged) {
        for (std::size_t i = 0; i < range.buffers && i < offsets.size(); ++i) {
            if (!fits(offsets[i], range.buffer_bytes, capacity)) return false;
        }
        return true;
    }
    std::uint64_t bytes = 0;
    if (__builtin_mul_overflow(range.numel, range.item_bytes, &bytes) || __builtin_mul_overflow(bytes, range.rows, &bytes)) return false;
    return fits(offsets[0], bytes, capacity);
}

}  // namespace ddpcomm

#endif  // __linux__
