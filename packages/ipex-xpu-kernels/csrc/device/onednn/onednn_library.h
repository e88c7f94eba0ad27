// SPDX-License-Identifier: Apache-2.0
// The C interface of a oneDNN for SYCL that is found at run time: nothing is linked, and without
// the library, or with one of another kind, there is a text that says so. Declared here are the
// functions and numbers that onednn_ops.cpp uses; they are part of the library's stable interface.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace ipex::xpu::onednn {

struct Engine;
struct Stream;
struct Memory;
struct Desc;  // of a memory
struct Attributes;
struct PostOps;
struct PrimitiveDesc;
struct Primitive;

inline constexpr int kMaxDims = 12;
using Dims = std::int64_t[kMaxDims];
struct Argument {
  int index;
  Memory* memory;
};
struct Version {
  int major;
  int minor;
  int patch;  // what follows is of no interest
};

enum DataType : int { kFloat16 = 1, kBFloat16 = 2, kFloat32 = 3 };
enum ArgumentIndex : int {
  kSource = 1,
  kResult = 17,
  kWeight = 33,
  kBias = 41,
  kScratch = 80,
  kSourceGradient = 129,
  kResultGradient = 145,
  kWeightGradient = 161
};
enum Query : int { kImplementation = 8, kScratchDesc = 136, kArgumentDesc = 255 };
inline constexpr int kAnyLayout = 1;         // format tag
inline constexpr int kForwardTraining = 64;  // propagation kind
inline constexpr int kDirect = 1;            // algorithm of convolutions
inline constexpr int kLinear = 0x26;         // algorithm of element-wise functions
inline constexpr int kScratchOfUser = 1;
inline constexpr int kUsm = 0;  // kind of memory

// Status 0 is success.
#define IPEX_ONEDNN_FUNCTIONS(X)                                                                  \
  X(version, const Version*, ())                                                                  \
  X(sycl_interop_engine_create, int, (Engine**, const void* device, const void* context))         \
  X(sycl_interop_stream_create, int, (Stream**, Engine*, void* queue))                            \
  X(sycl_interop_memory_create, int, (Memory**, const Desc*, Engine*, int kind, void*))           \
  X(sycl_interop_primitive_execute, int,                                                          \
    (const Primitive*, Stream*, int count, const Argument*, const void* after, void* event))      \
  X(memory_desc_create_with_strides, int,                                                         \
    (Desc**, int dims, const std::int64_t* sizes, int type, const std::int64_t* strides))         \
  X(memory_desc_create_with_tag, int,                                                             \
    (Desc**, int dims, const std::int64_t* sizes, int type, int tag))                             \
  X(memory_desc_equal, int, (const Desc*, const Desc*))                                           \
  X(memory_desc_get_size, std::size_t, (const Desc*))                                             \
  X(memory_desc_destroy, int, (Desc*))                                                            \
  X(memory_destroy, int, (Memory*))                                                               \
  X(primitive_attr_create, int, (Attributes**))                                                   \
  X(primitive_attr_set_scratchpad_mode, int, (Attributes*, int))                                  \
  X(primitive_attr_set_post_ops, int, (Attributes*, const PostOps*))                              \
  X(primitive_attr_destroy, int, (Attributes*))                                                   \
  X(post_ops_create, int, (PostOps**))                                                            \
  X(post_ops_append_sum, int, (PostOps*, float scale, std::int32_t zero, int type))               \
  X(post_ops_append_eltwise, int, (PostOps*, int algorithm, float alpha, float beta))             \
  X(post_ops_destroy, int, (PostOps*))                                                            \
  X(matmul_primitive_desc_create, int,                                                            \
    (PrimitiveDesc**, Engine*, const Desc* source, const Desc* weight, const Desc* bias,          \
     const Desc* result, const Attributes*))                                                      \
  X(convolution_forward_primitive_desc_create, int,                                               \
    (PrimitiveDesc**, Engine*, int kind, int algorithm, const Desc* source, const Desc* weight,   \
     const Desc* bias, const Desc* result, const std::int64_t* strides, const std::int64_t* gaps, \
     const std::int64_t* before, const std::int64_t* after, const Attributes*))                   \
  X(convolution_backward_data_primitive_desc_create, int,                                         \
    (PrimitiveDesc**, Engine*, int algorithm, const Desc* source, const Desc* weight,             \
     const Desc* result, const std::int64_t* strides, const std::int64_t* gaps,                   \
     const std::int64_t* before, const std::int64_t* after, const PrimitiveDesc* forward,         \
     const Attributes*))                                                                          \
  X(convolution_backward_weights_primitive_desc_create, int,                                      \
    (PrimitiveDesc**, Engine*, int algorithm, const Desc* source, const Desc* weight,             \
     const Desc* bias, const Desc* result, const std::int64_t* strides, const std::int64_t* gaps, \
     const std::int64_t* before, const std::int64_t* after, const PrimitiveDesc* forward,         \
     const Attributes*))                                                                          \
  X(reorder_primitive_desc_create, int,                                                           \
    (PrimitiveDesc**, const Desc* from, Engine*, const Desc* to, Engine*, const Attributes*))     \
  X(primitive_desc_query, int, (const PrimitiveDesc*, int what, int index, void* value))          \
  X(primitive_desc_query_md, const Desc*, (const PrimitiveDesc*, int what, int index))            \
  X(primitive_desc_destroy, int, (PrimitiveDesc*))                                                \
  X(primitive_create, int, (Primitive**, const PrimitiveDesc*))                                   \
  X(primitive_destroy, int, (Primitive*))

struct Library {
#define IPEX_ONEDNN_MEMBER(name, result, arguments) result(*name) arguments = nullptr;
  IPEX_ONEDNN_FUNCTIONS(IPEX_ONEDNN_MEMBER)
#undef IPEX_ONEDNN_MEMBER
};

// When oneDNN is used: never; where it was measured faster; for everything that it has.
enum class Mode : std::uint8_t { Off, Auto, Prefer };
void set_mode(Mode mode);
Mode mode();
// Where the library is; empty: nowhere, `why` being the reason. To be called before the first use.
void set_path(const std::string& path, const std::string& why);

// The library, loaded by the first call; null if it is missing or turned off.
const Library* library();
struct State {
  std::string path;
  std::string version;     // empty if it was not loaded
  std::string why;         // why not
  std::uint64_t runs = 0;  // ops that it has done
};
State state();  // loads it
void count_run();

}  // namespace ipex::xpu::onednn
