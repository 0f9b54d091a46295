#include "ddpcomm/layout.h"

#include <stdexcept>
#include <string>

namespace ddpcomm {

void Layout::check() const {
    if (numels.size() != offsets.size()) {
        throw std::invalid_argument("there are " + std::to_string(numels.size()) + " tensors but " + std::to_string(offsets.size()) +
                                    " offsets");
    }
    std::int64_t end = 0;
    for (std::size_t i = 0; i < count(); ++i) {
        const std::string where =
            "tensor " + std::to_string(i) + " (" + std::to_string(numels[i]) + " elements at offset " + std::to_string(offsets[i]) + ")";
        if (numels[i] < 0 || offsets[i] < 0) throw std::invalid_argument(where + " has a negative size or offset");
        if (offsets[i] < end) {
            throw std::invalid_argument(where + " begins before element " + std::to_string(end) +
                                        ", where the tensor before it ends; offsets must ascend and ranges must not overlap");
        }
        if (numels[i] > total_numel || offsets[i] > total_numel - numels[i]) {
            throw std::invalid_argument(where + " ends outside the buffer of " + std::to_string(total_numel) + " elements");
        }
        end = offsets[i] + numels[i];
    }
}

}  // namespace ddpcomm
