// Memory that every rank of a host maps: one segment a rank, in which that rank allocates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "ddpcomm/shared_memory_header.h"

namespace ddpcomm {

// A mapping of a segment, this rank's own or another's. It stays valid after its maker has died.
class Segment {
  public:
    // Throws std::system_error when the kernel refuses.
    Segment(int file, std::size_t capacity);
    // One that came from another process. Throws std::runtime_error, which says why, where it is not what its maker told of, or not safe to
    // use: another user's, open to others, of another size, not sealed, with a header that doesn't fit. Nothing remains mapped then.
    static std::unique_ptr<Segment> attach(int file, std::size_t capacity, const SegmentToken& token);
    ~Segment();
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;

    char* data() const { return data_; }
    std::size_t capacity() const { return capacity_; }
    bool contains(const void* address, std::size_t bytes) const;

  private:
    char* data_;
    std::size_t capacity_;
};

// A rank's own segment: an anonymous file (memfd), as large as it may ever get but without memory until something is allocated, so that
// the other ranks map it once and never need to hear of an allocation. It has no name, hence nothing remains of a killed rank; and it is
// no part of /dev/shm, hence not bound by that one's size, which is 64 MiB in most containers. Its mode is 0600: whoever can see this
// process in /proc but is another user can't open it.
class Arena {
  public:
    // Header and control blocks are allocated from the start and never freed. Throws std::system_error, and std::invalid_argument for a
    // capacity that no segment can have.
    explicit Arena(std::size_t capacity);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    Segment& segment() { return *segment_; }
    int file() const { return file_; }
    const SegmentToken& token() const { return token_; }

    // Offset of at least `bytes` bytes of zeros, aligned to a page and backed by memory from now on. Throws std::system_error when the
    // machine has no memory left, rather than letting a later access be killed by SIGBUS. Thread-safe, like `free`.
    std::size_t allocate(std::size_t bytes);
    // Gives the memory back to the machine. Does nothing in a forked child, and nothing after `freeze`.
    void free(std::size_t offset);
    // From now on nothing is given back or used again: a peer may still write to it, late.
    void freeze();
    // Gives up the file. What has been allocated stays until it is freed; nothing more can be. Idempotent.
    void close();

  private:
    std::size_t take(std::size_t bytes);
    void give(std::size_t offset, std::size_t bytes);

    int file_;  // -1 once closed
    int process_;
    SegmentToken token_;
    bool frozen_ = false;
    std::unique_ptr<Segment> segment_;
    std::mutex mutex_;
    std::map<std::size_t, std::size_t> gaps_;   // offset -> bytes that are free there
    std::map<std::size_t, std::size_t> taken_;  // offset -> bytes
};

// One allocation, which keeps the whole arena mapped.
class Allocation {
  public:
    Allocation(std::shared_ptr<Arena> arena, std::size_t bytes);
    ~Allocation();
    Allocation(const Allocation&) = delete;
    Allocation& operator=(const Allocation&) = delete;

    void* data() const { return arena_->segment().data() + offset_; }
    std::size_t bytes() const { return bytes_; }

  private:
    std::shared_ptr<Arena> arena_;
    std::size_t bytes_;
    std::size_t offset_;
};

}  // namespace ddpcomm
