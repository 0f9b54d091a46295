// Every loop that each instruction set compiles anew. Included below the choice of instructions and the definition of `Lanes`.

#include "ddpcomm/convert_kernel.h"
#include "ddpcomm/norm_kernel.h"
#include "ddpcomm/quantise_kernel.h"

namespace ddpcomm {
namespace {

constexpr KernelTable make_kernel_table(StreamFunction stream) {
    KernelTable table{};
    fill_convert_tables(table);
    fill_norm_table(table);
    fill_quantise_tables(table);
    table.stream = stream;
    return table;
}

}  // namespace
}  // namespace ddpcomm
