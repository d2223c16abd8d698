// Runs a method of a .pte once or several times, with inputs from files, and prints its outputs.
//
//   run_pte MODEL.pte METHOD TIMES [FILE:SIZE,SIZE,...]...
//
// A file holds the elements of an input, row-major, in the dtype that the method takes.

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>

using executorch::extension::make_tensor_ptr;
using executorch::extension::TensorPtr;

int main(int count, char** arguments) {
  if (count < 4) {
    std::fprintf(stderr, "usage: run_pte MODEL.pte METHOD TIMES [FILE:SIZE,SIZE,...]...\n");
    return 2;
  }
  const std::string method = arguments[2];
  executorch::extension::Module module(arguments[1]);
  const auto meta = module.method_meta(method);
  if (!meta.ok() || module.load_method(method) != executorch::runtime::Error::Ok) {
    std::fprintf(stderr, "cannot load %s\n", method.c_str());
    return 1;
  }
  std::vector<TensorPtr> tensors;
  std::vector<executorch::runtime::EValue> inputs;
  for (int n = 4; n < count; ++n) {
    const std::string argument = arguments[n];
    const size_t colon = argument.rfind(':');
    std::ifstream file(argument.substr(0, colon), std::ios::binary);
    std::vector<uint8_t> bytes((std::istreambuf_iterator<char>(file)), {});
    std::vector<executorch::aten::SizesType> sizes;
    std::istringstream listed(colon == std::string::npos ? "" : argument.substr(colon + 1));
    for (std::string size; std::getline(listed, size, ',');) {
      sizes.push_back(std::atoi(size.c_str()));
    }
    const auto info = meta->input_tensor_meta(n - 4);
    if (!info.ok()) {
      std::fprintf(stderr, "%s takes fewer inputs\n", method.c_str());
      return 1;
    }
    tensors.push_back(make_tensor_ptr(sizes, std::move(bytes), info->scalar_type()));
    inputs.emplace_back(tensors.back());
  }
  for (int time = 0; time < std::atoi(arguments[3]); ++time) {
    const auto outputs = module.execute(method, inputs);
    if (!outputs.ok()) {
      std::fprintf(stderr, "%s fails\n", method.c_str());
      return 1;
    }
    for (const auto& output : *outputs) {
      const auto& tensor = output.toTensor();
      for (ssize_t n = 0; n < tensor.numel(); ++n) {
        if (tensor.scalar_type() == executorch::aten::ScalarType::Float) {
          std::printf("%.9g ", tensor.const_data_ptr<float>()[n]);
        } else if (tensor.scalar_type() == executorch::aten::ScalarType::Long) {
          std::printf("%lld ", static_cast<long long>(tensor.const_data_ptr<int64_t>()[n]));
        }
      }
      std::printf("\n");
    }
  }
  return 0;
}
