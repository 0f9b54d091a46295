// Many tensors into 8-bit codes with a scale per block of 256 elements, with error feedback, and back.
//
// A block's scale is its largest magnitude divided by the code's largest number, so that nothing saturates; codes are rounded to nearest,
// ties to even. A block of which the scale would be below the smallest normal float is sent as zero. A block with a value that is not
// finite gets the scale NaN, so that every receiver sees it, and leaves a residual of zero.
#pragma once

#include "ddpcomm/kernel_table.h"
#include "ddpcomm/layout.h"

namespace ddpcomm {

// With value = pieces[i][j] * scale + residual (zero in place of a piece where there is none), element by element of the buffer:
// codes and scales are those of value, and residual becomes value - decoded value.
// residual: layout.total_numel floats, or null for no error feedback. codes: total_numel bytes. scales: total_numel / 256 floats.
// layout.total_numel is a multiple of 256; layout.dtype is not used. Pieces are of any type in dtype.h's tables.
void quantise(const Layout& layout, const Piece* pieces, double scale, Code code, float* residual, std::uint8_t* codes, float* scales,
              Execution execution);

// pieces[i][j] = decoded[offsets[i] + j] * scale, or that much more when accumulating. Entries without a tensor are skipped.
void dequantise(const Layout& layout, const Piece* pieces, double scale, Code code, bool accumulate, const std::uint8_t* codes,
                const float* scales, Execution execution);

}  // namespace ddpcomm
