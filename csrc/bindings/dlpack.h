// The part of the DLPack C exchange interface (DLPack 1.3) that is used here: an agreed binary layout, stable within its major version.
// torch offers it from 2.10 on, as torch.Tensor.__dlpack_c_exchange_api__.
#pragma once

#include <cstdint>

namespace dlpack {

inline constexpr std::uint32_t kMajorVersion = 1;
inline constexpr std::int32_t kCpu = 1;
inline constexpr std::int32_t kCuda = 2;
inline constexpr std::int32_t kOther = -1;

struct Tensor {
    void* data;
    std::int32_t device_type;
    std::int32_t device_id;
    std::int32_t ndim;
    std::uint8_t dtype_code;
    std::uint8_t dtype_bits;
    std::uint16_t dtype_lanes;
    std::int64_t* shape;
    std::int64_t* strides;  // in elements
    std::uint64_t byte_offset;
};

struct ExchangeApi {
    std::uint32_t major_version;
    std::uint32_t minor_version;
    ExchangeApi* previous;
    void* managed_tensor_allocator;
    void* managed_tensor_from_py_object;
    void* managed_tensor_to_py_object;
    int (*tensor_from_py_object)(void* object, Tensor* out);  // borrows; -1 with a Python error set
    void* current_work_stream;
};

}  // namespace dlpack
