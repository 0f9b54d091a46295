// The kernels of every instruction set against plain loops, on memory that is exactly as large as it has to be, at sizes and addresses that
// fit no vector: so that AddressSanitizer finds what reads or writes past an end, which the values alone don't show.
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "check.h"
#include "ddpcomm/flatten.h"
#include "ddpcomm/norm.h"
#include "ddpcomm/quantise.h"
#include "ddpcomm/shared_memory_reduce.h"
#include "ddpcomm/unflatten.h"

using namespace ddpcomm;

namespace {

// `count` floats of which the last one ends where the allocation ends, and which begin at an odd address.
class Floats {
  public:
    explicit Floats(std::size_t count) : bytes_(new char[count * sizeof(float) + 1]), count_(count) {}
    void* data() const { return bytes_.get() + 1; }
    float operator[](std::size_t i) const {
        float value;
        std::memcpy(&value, bytes_.get() + 1 + i * sizeof(float), sizeof(float));
        return value;
    }
    void set(std::size_t i, float value) { std::memcpy(bytes_.get() + 1 + i * sizeof(float), &value, sizeof(float)); }
    void fill(Generator& generator) {
        for (std::size_t i = 0; i < count_; ++i) set(i, static_cast<float>(static_cast<int>(below(generator, 2001)) - 1000) / 8);
    }

  private:
    std::unique_ptr<char[]> bytes_;
    std::size_t count_;
};

struct Case {
    Layout layout;
    std::vector<Floats> tensors;
    std::vector<Piece> pieces;
};

Case make_case(Generator& generator, std::int64_t tail) {
    Case made;
    std::int64_t end = 0;
    for (int i = 0; i < 6; ++i) {
        const auto numel = static_cast<std::int64_t>(below(generator, i == 3 ? 5000 : 70));
        const auto offset = end + static_cast<std::int64_t>(below(generator, 4));
        made.layout.numels.push_back(numel);
        made.layout.offsets.push_back(offset);
        end = offset + numel;
        made.tensors.emplace_back(static_cast<std::size_t>(numel));
        made.tensors.back().fill(generator);
    }
    made.layout.total_numel = end + tail;
    made.layout.dtype = kFloat32;
    made.layout.check();
    for (std::size_t i = 0; i < made.tensors.size(); ++i) made.pieces.push_back({i == 1 ? nullptr : made.tensors[i].data(), kFloat32});
    return made;
}

void flat_and_back(Isa isa, int threads) {
    Generator generator(1);
    for (int round = 0; round < 20; ++round) {
        Case made = make_case(generator, round % 3);
        const auto total = static_cast<std::size_t>(made.layout.total_numel);
        Floats flat(total);
        flatten(made.layout, made.pieces.data(), flat.data(), 0.5, false, {threads, isa});
        std::vector<float> expected(total, 0.0f);
        double squares = 0;
        for (std::size_t i = 0; i < made.pieces.size(); ++i) {
            for (std::int64_t j = 0; made.pieces[i].data && j < made.layout.numels[i]; ++j) {
                const float value = made.tensors[i][static_cast<std::size_t>(j)] * 0.5f;
                expected[static_cast<std::size_t>(made.layout.offsets[i] + j)] = value;
                squares += static_cast<double>(value) * value;
            }
        }
        for (std::size_t i = 0; i < total; ++i) CHECK(flat[i] == expected[i]);
        CHECK(std::fabs(norm(made.layout, flat.data(), {threads, isa}).sum_of_squares - squares) <= 1e-4 * (1 + squares));
        unflatten(made.layout, flat.data(), made.pieces.data(), 2.0, {threads, isa});
        for (std::size_t i = 0; i < made.pieces.size(); ++i) {
            for (std::int64_t j = 0; made.pieces[i].data && j < made.layout.numels[i]; ++j) {
                CHECK(made.tensors[i][static_cast<std::size_t>(j)] == 2 * expected[static_cast<std::size_t>(made.layout.offsets[i] + j)]);
            }
        }
        const Norm found = unflatten_with_norm(made.layout, flat.data(), made.pieces.data(), 1.0, {threads, isa});
        CHECK(found.nonfinite == 0);
    }
}

// Every pair of types: what is read and written lies where it should.
void conversions(Isa isa) {
    const Dtype types[] = {kFloat32, kFloat64, kBFloat16, kFloat16, kFloat8E4M3, kFloat8E5M2};
    for (const Dtype from : types) {
        for (const Dtype to : types) {
            const ConvertFunction convert = kernel_table(isa).convert[float_index(from)][float_index(to)];
            if (convert == nullptr) continue;
            for (std::size_t count = 0; count < 70; ++count) {
                const std::unique_ptr<char[]> source(new char[count * from.bytes()]()), target(new char[count * to.bytes()]);
                convert(source.get(), target.get(), count, 1.0);
                for (std::size_t i = 0; i < count * to.bytes(); ++i) CHECK(target[i] == 0);
            }
        }
    }
}

void reductions(Isa isa) {
    const Dtype types[] = {kFloat32, kFloat64, kBFloat16, kFloat16, kInt64, kInt32, kInt16, kInt8, kUInt8};
    for (const Dtype type : types) {
        for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
            const ReduceFunction function = reduce_function(type, op, isa);
            CHECK(function != nullptr);
            for (int sources = 1; sources <= 4; ++sources) {
                for (std::size_t count = 0; count < 200; count += count < 70 ? 1 : 43) {
                    const std::size_t bytes = count * type.bytes();
                    std::vector<std::unique_ptr<char[]>> memory;
                    std::vector<void*> all;
                    for (int i = 0; i < sources; ++i) {
                        memory.emplace_back(new char[bytes + 1]());  // at an odd address
                        all.push_back(memory.back().get() + 1);
                    }
                    function({all.data(), sources, all.data(), sources, count, 1.0});
                    for (const auto& each : memory) {
                        for (std::size_t i = 0; i < bytes; ++i) CHECK(each[i + 1] == 0);
                    }
                }
            }
        }
    }
    Floats one(77), two(77);
    Generator generator(3);
    one.fill(generator);
    two.fill(generator);
    std::vector<float> sums;
    for (std::size_t i = 0; i < 77; ++i) sums.push_back(one[i] + two[i]);
    void* both[] = {one.data(), two.data()};
    reduce_function(kFloat32, ReduceOp::kSum, isa)({both, 2, both, 2, 77, 1.0});
    for (std::size_t i = 0; i < 77; ++i) CHECK(one[i] == sums[i] && two[i] == sums[i]);
}

void codes(Isa isa) {
    Generator generator(5);
    for (const Code code : {Code::kInt8, Code::kFloat8E4M3, Code::kFloat8E5M2}) {
        Case made = make_case(generator, 0);
        made.layout.total_numel = (made.layout.total_numel + 255) / 256 * 256;
        const auto total = static_cast<std::size_t>(made.layout.total_numel);
        const std::unique_ptr<float[]> residual(new float[total]()), scales(new float[total / 256]);
        const std::unique_ptr<std::uint8_t[]> coded(new std::uint8_t[total]);
        quantise(made.layout, made.pieces.data(), 1.0, code, residual.get(), coded.get(), scales.get(), {2, isa});
        std::vector<Floats> before;
        for (std::size_t i = 0; i < made.tensors.size(); ++i) {
            before.emplace_back(static_cast<std::size_t>(made.layout.numels[i]));
            for (std::int64_t j = 0; j < made.layout.numels[i]; ++j)
                before[i].set(static_cast<std::size_t>(j), made.tensors[i][static_cast<std::size_t>(j)]);
        }
        dequantise(made.layout, made.pieces.data(), 1.0, code, false, coded.get(), scales.get(), {2, isa});
        for (std::size_t i = 0; i < made.pieces.size(); ++i) {
            for (std::int64_t j = 0; made.pieces[i].data && j < made.layout.numels[i]; ++j) {
                const float lost = residual[static_cast<std::size_t>(made.layout.offsets[i] + j)];
                const float sum = made.tensors[i][static_cast<std::size_t>(j)] + lost;
                CHECK(std::fabs(sum - before[i][static_cast<std::size_t>(j)]) <= 1e-3f);
            }
        }
    }
}

}  // namespace

int main() {
    for (const Isa isa : available_isas()) {
        flat_and_back(isa, 1);
        flat_and_back(isa, 3);
        conversions(isa);
        reductions(isa);
        codes(isa);
        std::printf("kernels, %s: passed\n", isa_name(isa));
    }
}
