// Native calls of a delegate, without Python, with ExecuTorch's tensors.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>
#include <vector>

#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/core/span.h>

#include "native_calls.h"

namespace {

using NativeValues = executorch::runtime::Span<executorch::runtime::EValue*>;

// A NativeResize; its context is the values of the call.
void* resize_value(void* context, uint64_t n, const int64_t* sizes, uint64_t rank) {
  using executorch::aten::SizesType;
  std::array<SizesType, executorch::runtime::kTensorDimensionLimit> target{};
  if (rank > target.size()) {
    return nullptr;
  }
  for (uint64_t axis = 0; axis < rank; ++axis) {
    target[axis] = static_cast<SizesType>(sizes[axis]);
  }
  const auto& values = *static_cast<NativeValues*>(context);
  executorch::aten::Tensor& tensor = values[n]->toTensor();
  const executorch::aten::ArrayRef<SizesType> shape(target.data(), rank);
  if (executorch::runtime::resize_tensor(tensor, shape) !=
      executorch::runtime::Error::Ok) {
    return nullptr;
  }
  return tensor.mutable_data_ptr();
}

// Returns kNotHere also for a value that is not a row-major tensor.
int32_t call_natively(NativeRun run, void* model, NativeValues values) {
  static_assert(
      std::is_same_v<executorch::aten::SizesType, int32_t>,
      "sizes are passed as they are");
  std::vector<NativeArgument> arguments;
  try {
    arguments.resize(values.size());
  } catch (const std::bad_alloc&) { // nothing may be thrown into the runtime
    return kFailed;
  }
  for (size_t n = 0; n < values.size(); ++n) {
    if (values[n] == nullptr || !values[n]->isTensor()) {
      return kNotHere;
    }
    const executorch::aten::Tensor& tensor = values[n]->toTensor();
    if (!executorch::runtime::is_contiguous_dim_order(
            tensor.dim_order().data(), tensor.dim_order().size())) {
      return kNotHere;
    }
    arguments[n] = {
        tensor.mutable_data_ptr(),
        tensor.sizes().data(),
        static_cast<int32_t>(tensor.dim()),
        static_cast<int32_t>(tensor.scalar_type())};
  }
  return run(model, arguments.data(), values.size(), resize_value, &values);
}

} // namespace
