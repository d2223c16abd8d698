// Eight threads that call one model natively, a thousand times each; built with ThreadSanitizer.
//
// Usage: native_threads MODEL, an exported model with inputs float32 [2, 300] and int32 [3], which
// gives a multiple of the first, float32 [2, 6000], and the second plus one.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <thread>

#include NATIVE_CALLS

namespace {

constexpr int kThreads = 8;
constexpr int kRuns = 1000;
constexpr size_t kNewMemory = 50; // runs until a caller passes another tensor

// Runs with inputs of this thread alone; returns how many results were wrong.
int call(void* model, int64_t number, std::vector<float>& result) {
  const std::vector<float> x(600, static_cast<float>(number + 1));
  const std::vector<int64_t> n{number, number + 1, number + 2};
  std::vector<float> y(12000);
  std::vector<int64_t> m(3);
  const int32_t sizes[4][2] = {{2, 300}, {3}, {2, 6000}, {3}};
  int wrong = 0;
  for (size_t run = 0; run < kRuns; ++run) {
    if (run % kNewMemory == 0) {
      std::vector<float>(12000).swap(y);
    }
    std::fill(y.begin(), y.end(), NAN);
    const NativeArgument arguments[] = {
        {const_cast<float*>(x.data()), sizes[0], 2, 6},
        {const_cast<int64_t*>(n.data()), sizes[1], 1, kLong},
        {y.data(), sizes[2], 2, 6},
        {m.data(), sizes[3], 1, kLong}};
    const bool is_done = coreml_native_run(model, arguments, 4, nullptr, nullptr) == kDone;
    if (result.empty()) {
      result = y;
    }
    wrong += !is_done || y != result || m[0] != number + 1 || m[2] != number + 3;
  }
  return wrong;
}

} // namespace

int main(int, char** arguments) {
  std::ifstream file(arguments[1], std::ios::binary);
  const std::string content{std::istreambuf_iterator<char>(file), {}};
  const int64_t function[] = {
      2, // inputs: whether of any rank, rank; of each dimension the bounds, and no equal one
      0, 2, 2, 2, -1, -1, 300, 300, -1, -1,
      0, 1, 3, 3, -1, -1};
  const int64_t ports[] = {
      0, // it has more than one thread
      2, 0, F32, 0, 2, 2, 300, 1, I32, 0, 1, 3, // inputs: index, type, not fetched, rank, sizes
      2, 0, F32, 0, 2, 2, 6000, 1, I32, 0, 1, 3, // outputs
      0}; // states
  const char* const config[] = {"PERFORMANCE_HINT", "LATENCY"};
  char error[1024] = "";
  void* const loaded = coreml_native_create(
      function, std::size(function), "CPU", config, 1, error, sizeof error);
  const auto add = [&] {
    return loaded != nullptr &&
        coreml_native_add(
               loaded, ports, std::size(ports), content.data(), content.size(), error,
               sizeof error) == 1;
  };
  void* const model = add() ? coreml_native_bind(loaded, nullptr) : nullptr;
  if (model == nullptr) {
    std::printf("not loaded: %s\n", error);
    return 1;
  }
  std::vector<std::vector<float>> results(kThreads);
  std::vector<int> wrong(kThreads);
  std::vector<std::thread> threads;
  for (int n = 0; n < kThreads; ++n) {
    threads.emplace_back([&, n] { wrong[n] = call(model, n, results[n]); });
  }
  const bool is_added = add(); // while the model is called
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (int n = 0; n < kThreads; ++n) {
    for (size_t at = 0; at < results[n].size(); ++at) {
      const float expected = results[0][at] * static_cast<float>(n + 1);
      wrong[n] += std::fabs(results[n][at] - expected) > 1e-4F * std::fabs(expected) + 1e-4F;
    }
    std::printf("thread %d: %d wrong\n", n, wrong[n]);
  }
  coreml_native_unbind(model);
  coreml_native_free(loaded);
  return !is_added ||
      std::any_of(wrong.begin(), wrong.end(), [](int count) { return count > 0; });
}
