// SPDX-License-Identifier: Apache-2.0
#include "convolution/convolution.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "ipex/glue/argument_checks.h"
#include "ipex/glue/gemm_schedule.h"
#include "ipex/glue/image.h"
#include "ipex/kernel/gemm_sizes.h"
#include "linear/epilogue_check.h"
#include "linear/packed_check.h"
#include "runtime/scratch.h"

namespace ipex {
namespace {

const auto kernels = IPEX_KERNELS("convolution", convolution);

using Pair = std::vector<int64_t>;

void check_pair(const char* name, const Pair& value, int64_t least) {
  constexpr int64_t kMost = 4096;  // beyond it sizes could overflow
  const bool two = value.size() == 2;
  if (two && std::min(value[0], value[1]) >= least && std::max(value[0], value[1]) <= kMost) return;
  std::string text;
  for (const int64_t v : value) text += (text.empty() ? "" : ", ") + std::to_string(v);
  fail("convolution: ", name, " must be 2 numbers from ", least, " to ", kMost, ", got [", text,
       "]");
}

// What x has beside the window, 0 or more if the result has any pixel.
int64_t room(int64_t size, int64_t taps, int64_t padding, int64_t dilation) {
  return size + 2 * padding - dilation * (taps - 1) - 1;
}

constexpr int64_t kVectorRows = 96;

// Rows of a task, about `most`: blocks of equal size, so that none of few rows is left to stream
// all panels for, and as many as give each thread the same number of them.
int64_t even_rows(int64_t rows, int64_t most) {
  const auto parts = [](int64_t n, int64_t size) { return (n + size - 1) / size; };
  const auto threads = static_cast<int64_t>(torch::stable::get_num_threads());
  const int64_t blocks = std::max<int64_t>(1, parts(rows, most));
  const int64_t even = parts(blocks, threads) * threads;
  const bool enough = blocks > 1 && rows >= even * kVectorRows;
  return std::max<int64_t>(24, parts(parts(rows, enough ? even : blocks), 6) * 6);
}

// Without tiles, x can be read where it lies: in float, and in pairs of bfloat16, which may lie in
// two segments within a piece of K but not in two pieces.
bool is_direct(const ConvolutionArgs& args, ScalarType dtype) {
  if (dtype == ScalarType::Float) return true;
  return dtype == ScalarType::BFloat16 && cpu::active_has_avx512_bf16() && !cpu::active_has_amx() &&
         (args.k() / direct_segments(args) % 2 == 0 || direct_whole(args.k(), 2));
}

// Whether the weight was transformed for winograd.h.
bool is_winograd(const ConvolutionArgs& args, const Tensor& packed) {
  if (!winograd_has(args)) return false;
  const int64_t k = kWinogradPlaces * args.channels;
  if (!packed.is_cpu() || packed.scalar_type() != ScalarType::Byte || packed.dim() != 1 ||
      packed.size(0) != packed_bytes(args.n, k, 0) || !packed.is_contiguous())
    return false;
  const auto* header = static_cast<const PackedHeader*>(packed.const_data_ptr());
  return header->magic == kPackedMagic && header->version == kPackedVersion &&
         header->format == kFormatWinograd && header->n == args.n && header->k == k;
}

// The most if direct, where a task reads the weight once for all its rows, and x for every panel:
// as many rows as see a part of L2.
int64_t most_direct_rows(const ConvolutionArgs& args, int64_t element_size) {
  constexpr int64_t kSeen = 384 * 1024, kMost = 384;
  const int64_t pixel = args.stride_y * args.stride_x * args.channels * element_size;
  return std::clamp(kSeen / pixel, kVectorRows, kMost);
}

// Blocks of y of a task by minimal filtering: the weights are read once for all of them.
constexpr int64_t kWinogradRows = 60;

// What the copies of a task on tiles may take, a part of L2.
constexpr int64_t kCopies = 512 * 1024;

// Bytes of the copies of a task.
int64_t copy_bytes(const ConvolutionArgs& args, int64_t rows, int64_t element_size) {
  if (args.winograd) return WinogradScratch(args, rows).bytes;
  if (args.direct) return DirectScratch(args, rows, element_size).bytes;
  if (args.in_place()) return 0;
  if (args.by_lines) return convolution_lines_bytes(args, rows);
  return rows * convolution_stride(args.k()) * element_size;
}

Tensor convolution(const Tensor& x, const Tensor& packed_weight, int64_t out_channels,
                   Pair kernel_size, Pair stride, Pair padding, Pair dilation,
                   const OptionalTensor& bias, const OptionalTensor& residual,
                   std::string activation, int64_t groups) {
  const char* op = "convolution";
  check_tensor(op, "x", x);
  IPEX_CHECK(x.dim() == 4 && x.size(1) > 0, op,
             ": x must be 4-D [N, C, H, W] with C > 0, got shape ", shape_text(x));
  IPEX_CHECK(out_channels > 0, op, ": out_channels must be positive, got ", out_channels);
  IPEX_CHECK(groups > 0 && x.size(1) % groups == 0 && out_channels % groups == 0, op,
             ": groups must divide the ", x.size(1),
             " channels of x and out_channels = ", out_channels, ", got ", groups);
  check_pair("kernel_size", kernel_size, 1);
  check_pair("stride", stride, 1);
  check_pair("padding", padding, 0);
  check_pair("dilation", dilation, 1);
  ConvolutionArgs args{};
  IPEX_CHECK(parse_activation(activation, &args.epilogue.activation), op,
             ": activation must be one of none, relu, gelu, gelu_tanh, silu, got ", activation);
  args.height = x.size(2), args.width = x.size(3), args.channels = x.size(1);
  args.taps_y = kernel_size[0], args.taps_x = kernel_size[1];
  args.stride_y = stride[0], args.stride_x = stride[1];
  args.padding_y = padding[0], args.padding_x = padding[1];
  args.dilation_y = dilation[0], args.dilation_x = dilation[1];
  const int64_t down = room(args.height, args.taps_y, args.padding_y, args.dilation_y);
  const int64_t right = room(args.width, args.taps_x, args.padding_x, args.dilation_x);
  IPEX_CHECK(down >= 0 && right >= 0, op,
             ": x must have at least the size of the window with its padding, got shape ",
             shape_text(x));
  args.out_height = down / args.stride_y + 1, args.out_width = right / args.stride_x + 1;
  args.n = out_channels, args.groups = groups;
  // Each group begins with a panel of its own.
  const int64_t panels = groups * args.panels();
  const int64_t rows = groups == 1 ? out_channels : panels * kPackedPanel;
  args.winograd = is_winograd(args, packed_weight);
  if (!args.winograd)
    check_packed(op, "packed_weight", packed_weight, rows, args.k(), x.scalar_type());
  const int64_t images = x.size(0);
  check_shaped(op, "bias", bias, {out_channels}, x, "x", true);
  check_shaped(op, "residual", residual, {images, out_channels, args.out_height, args.out_width}, x,
               "x", false);

  Tensor y =
      new_image(images, out_channels, args.out_height, args.out_width, true, x.scalar_type());
  const Tensor from = as_channels_last(x);
  OptionalTensor bias_values, addend;
  if (bias) {
    bias_values = as_contiguous(*bias);
    args.epilogue.bias = bias_values->const_data_ptr();
    args.epilogue.bias_is_f32 = bias->scalar_type() == ScalarType::Float;
  }
  if (residual) {
    addend = as_channels_last(*residual);
    args.residual = addend->const_data_ptr();
  }
  args.x = from.const_data_ptr();
  args.weight = static_cast<const char*>(packed_weight.const_data_ptr()) + sizeof(PackedHeader);
  args.y = y.mutable_data_ptr();

  GemmShape shape{images * args.out_height * args.out_width, panels, args.k()};
  if (args.winograd) shape.rows = images * args.blocks_down() * args.blocks_across();
  shape.tiles = !args.winograd && uses_tiles(x.scalar_type());
  const bool tiles = shape.on_tiles();
  args.direct = !args.winograd && is_direct(args, x.scalar_type());
  // A tile has two panels.
  if ((args.direct || args.winograd) && args.panels() % 2 == 0) shape.unit = 2;
  const int64_t most = args.winograd ? kWinogradRows
                       : args.direct ? most_direct_rows(args, x.element_size())
                                     : kVectorRows;
  int64_t block = tiles ? kTileRowsMost : even_rows(shape.rows, most);
  if (tiles) {
    args.by_lines = convolution_has_lines(args) && convolution_lines_bytes(args, 32) <= kCopies;
    if (args.by_lines) shape.rows = images * args.out_height * args.padded_width();
    while (block > 32 && copy_bytes(args, block, x.element_size()) > kCopies) block /= 2;
  }
  const int64_t bytes = copy_bytes(args, block, x.element_size());
  std::atomic<bool> failed{false};
  kernels.visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    const bool scratch = tiles || (!args.winograd && shape.rows >= widened_from<T>());
    run_gemm(shape, block, tiles ? kTilePanelsMost : shape.panels,
             [&](int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
               char* copies = Scratch<Area::kConvolutionRows>::get(bytes);
               char* of_tiles = gemm_scratch(scratch);
               if (copies && (of_tiles || !tiles))
                 kernel(&args, row_begin, row_end, panel_begin, panel_end, copies, of_tiles);
               else
                 failed = true;
             });
  });
  IPEX_CHECK(!failed, op, ": out of memory");
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { IPEX_IMPL(m, "convolution", ipex::convolution); }
