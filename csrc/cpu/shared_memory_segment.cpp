#if defined(__linux__)

#include "ddpcomm/shared_memory_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

// Newer than the headers that some build machines have.
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace ddpcomm {
namespace {

[[noreturn]] void throw_errno(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

std::size_t round_up_to_page(std::size_t bytes) {
    static const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    return (bytes + page - 1) / page * page;
}

int create_anonymous_file() {
    constexpr unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
    int file = memfd_create("ddpcomm", flags | MFD_NOEXEC_SEAL);
    if (file < 0 && errno == EINVAL) file = memfd_create("ddpcomm", flags);  // before Linux 6.3
    if (file < 0) throw_errno("memfd_create");
    return file;
}

SegmentToken random_token() {
    SegmentToken token;
    // As few bytes come whole or not at all.
    if (getrandom(token.data(), token.size(), 0) != static_cast<ssize_t>(token.size())) throw_errno("getrandom");
    return token;
}

SegmentFile describe_file(int file) {
    struct stat status;
    if (fstat(file, &status) != 0) throw_errno("fstat");
    return {status.st_mode, status.st_uid, static_cast<std::int64_t>(status.st_size), fcntl(file, F_GET_SEALS)};
}

void refuse_if(const std::string& wrong) {
    if (!wrong.empty()) throw std::runtime_error("another rank's segment is refused: " + wrong);
}

}  // namespace

Segment::Segment(int file, std::size_t capacity) : capacity_(capacity) {
    void* address = mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (address == MAP_FAILED) throw_errno("mmap");
    data_ = static_cast<char*>(address);
    // Advice only; a kernel may know neither.
    madvise(address, capacity, MADV_DONTDUMP);
    madvise(address, capacity, MADV_HUGEPAGE);
}

std::unique_ptr<Segment> Segment::attach(int file, std::size_t capacity, const SegmentToken& token) {
    refuse_if(check_file(describe_file(file), capacity, geteuid()));
    auto segment = std::make_unique<Segment>(file, capacity);
    refuse_if(check_header(segment->data(), kHeaderBytes, capacity, token));
    return segment;
}

Segment::~Segment() { munmap(data_, capacity_); }

bool Segment::contains(const void* address, std::size_t bytes) const {
    const char* at = static_cast<const char*>(address);
    return at >= data_ && at < data_ + capacity_ && bytes <= static_cast<std::size_t>(data_ + capacity_ - at);
}

Arena::Arena(std::size_t capacity) : file_(create_anonymous_file()), process_(getpid()) {
    try {
        const std::string wrong = check_capacity(capacity);
        if (!wrong.empty()) throw std::invalid_argument("this can't be a segment: " + wrong);
        capacity = round_up_to_page(capacity);
        token_ = random_token();
        if (fchmod(file_, S_IRUSR | S_IWUSR) != 0) throw_errno("fchmod");
        if (ftruncate(file_, static_cast<off_t>(capacity)) != 0) throw_errno("ftruncate");
        // A peer that shrank the file would kill this process at its next access.
        if (fcntl(file_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) throw_errno("fcntl(F_ADD_SEALS)");
        segment_ = std::make_unique<Segment>(file_, capacity);
        gaps_[0] = capacity;
        allocate(kReservedBytes);
        const SegmentHeader header = make_header(capacity, token_);
        std::memcpy(segment_->data(), &header, sizeof(header));
    } catch (...) {
        ::close(file_);
        throw;
    }
}

Arena::~Arena() { close(); }

void Arena::close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (file_ >= 0) ::close(file_);
    file_ = -1;
}

std::size_t Arena::allocate(std::size_t bytes) {
    if (bytes > segment_->capacity()) throw std::system_error(ENOSPC, std::generic_category(), "more than the segment's capacity");
    bytes = round_up_to_page(std::max<std::size_t>(bytes, 1));
    const std::lock_guard<std::mutex> lock(mutex_);
    if (file_ < 0) throw std::system_error(EBADF, std::generic_category(), "the segment is closed");
    const std::size_t offset = take(bytes);
    int error;
    do {
        error = posix_fallocate(file_, static_cast<off_t>(offset), static_cast<off_t>(bytes));
    } while (error == EINTR);
    if (error != 0) {
        give(offset, bytes);
        throw std::system_error(error, std::generic_category(), "posix_fallocate");
    }
    taken_[offset] = bytes;
    madvise(segment_->data() + offset, bytes, MADV_POPULATE_WRITE);  // saves the first step its page faults; before Linux 5.14 it can't
    return offset;
}

void Arena::free(std::size_t offset) {
    if (getpid() != process_) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = taken_.find(offset);
    if (frozen_ || found == taken_.end()) return;
    const std::size_t bytes = found->second;
    taken_.erase(found);
    madvise(segment_->data() + offset, bytes, MADV_REMOVE);  // a hole in the file, which may be closed
    give(offset, bytes);
}

void Arena::freeze() {
    const std::lock_guard<std::mutex> lock(mutex_);
    frozen_ = true;
}

// First fit.
std::size_t Arena::take(std::size_t bytes) {
    const auto gap = std::find_if(gaps_.begin(), gaps_.end(), [bytes](const auto& each) { return each.second >= bytes; });
    if (gap == gaps_.end()) throw std::system_error(ENOSPC, std::generic_category(), "the segment's capacity is used up");
    const std::size_t offset = gap->first;
    const std::size_t rest = gap->second - bytes;
    gaps_.erase(gap);
    if (rest != 0) gaps_[offset + bytes] = rest;
    return offset;
}

void Arena::give(std::size_t offset, std::size_t bytes) {
    auto next = gaps_.lower_bound(offset);
    if (next != gaps_.end() && offset + bytes == next->first) {
        bytes += next->second;
        next = gaps_.erase(next);
    }
    if (next != gaps_.begin()) {
        const auto previous = std::prev(next);
        if (previous->first + previous->second == offset) {
            previous->second += bytes;
            return;
        }
    }
    gaps_[offset] = bytes;
}

Allocation::Allocation(std::shared_ptr<Arena> arena, std::size_t bytes)
    : arena_(std::move(arena)), bytes_(bytes), offset_(arena_->allocate(bytes)) {}

Allocation::~Allocation() { arena_->free(offset_); }

}  // namespace ddpcomm

#endif  // __linux__
