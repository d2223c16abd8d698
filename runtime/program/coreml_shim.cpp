// A backend of the stock ExecuTorch runtime whose delegates are executed by callbacks.
//
// The interface is a plain C table, called through ctypes: it needs neither Python's nor torch's
// headers, and builds in seconds. The runtime is built without exceptions, so functions that it
// calls must not throw.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <new>
#include <streambuf>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/core/error.h>
#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/core/event_tracer_hooks_delegate.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/platform/log.h>
#include <executorch/runtime/platform/platform.h>

#include "delegate_calls.h"

namespace {

namespace et = executorch::runtime;
using executorch::aten::ArrayRef;
using executorch::aten::SizesType;
using executorch::aten::Tensor;

// --- The interface; shim.py has the Python side of it. ----------------------------------------

struct SpecView {
  const char* key;
  const void* value;
  uint64_t nbytes;
};

// Each returns an ExecuTorch error code. `delegate` identifies one loaded delegate.
using InitCallback = int32_t (*)(
    void* delegate,
    const char* backend,
    const char* method,
    const void* processed,
    uint64_t nbytes,
    const SpecView* specs,
    uint64_t spec_count,
    int32_t is_observed);
// `tracer` is null unless events are to be logged.
using ExecuteCallback = int32_t (*)(
    void* delegate,
    const int64_t* records,
    uint64_t length,
    void* tracer);
using DestroyCallback = void (*)(void* delegate);

struct Callbacks {
  InitCallback init;
  ExecuteCallback execute;
  DestroyCallback destroy;
};

// A value is passed as int64 numbers: these fields, then `rank` sizes and `rank` strides.
enum Field : size_t {
  kIsTensor, // 0: no tensor, and the other fields are zero
  kDtype, // ScalarType number
  kRank,
  kIsDynamic, // whether the shape may change
  kData, // address
  kNbytes,
  kValue, // address of the EValue, for resizing
  kFieldCount,
};

constexpr int32_t kInterfaceVersion = 4;

// --- State --------------------------------------------------------------------------------------

// Set before the interpreter ends, after which callbacks would be invalid.
std::atomic<bool> closed{false};

struct Delegate {
  // Valid only while init runs, because the map belongs to the program.
  const et::NamedDataMap* named_data = nullptr;
  // Set while init runs, if the delegate can be called without Python.
  NativeRun native_run = nullptr;
  void* native_model = nullptr;
  // Keeps named data alive as long as the delegate may read it.
  std::vector<et::FreeableBuffer> buffers;
};

// The Python bindings redirect std::cout and std::cerr during each call and restore the previous
// buffers. While a callback lets other threads run, two calls can interleave and restore in the
// wrong order, leaving a stream with a destroyed buffer. Callbacks therefore run with the streams'
// original buffers.
class StreamGuard {
 public:
  StreamGuard()
      : out_(std::cout.rdbuf(real_out())), err_(std::cerr.rdbuf(real_err())) {}
  ~StreamGuard() {
    std::cout.rdbuf(out_);
    std::cerr.rdbuf(err_);
  }
  StreamGuard(const StreamGuard&) = delete;
  StreamGuard& operator=(const StreamGuard&) = delete;

  // First called at registration, outside any redirection.
  static std::streambuf* real_out() {
    static std::streambuf* const buffer = std::cout.rdbuf();
    return buffer;
  }
  static std::streambuf* real_err() {
    static std::streambuf* const buffer = std::cerr.rdbuf();
    return buffer;
  }

 private:
  std::streambuf* const out_;
  std::streambuf* const err_;
};

int64_t address(const void* pointer) {
  return static_cast<int64_t>(reinterpret_cast<intptr_t>(pointer));
}

void append_record(et::EValue* value, std::vector<int64_t>& records) {
  const size_t start = records.size();
  records.resize(start + kFieldCount, 0);
  if (value == nullptr || !value->isTensor()) {
    return;
  }
  const Tensor& tensor = value->toTensor();
  const auto rank = static_cast<size_t>(tensor.dim());
  int64_t* const fields = records.data() + start;
  fields[kIsTensor] = 1;
  fields[kDtype] = static_cast<int64_t>(tensor.scalar_type());
  fields[kRank] = static_cast<int64_t>(rank);
  fields[kIsDynamic] =
      tensor.shape_dynamism() != executorch::aten::TensorShapeDynamism::STATIC;
  fields[kData] = address(tensor.const_data_ptr());
  fields[kNbytes] = static_cast<int64_t>(tensor.nbytes());
  fields[kValue] = address(value);
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  records.insert(records.end(), sizes.begin(), sizes.end());
  records.insert(records.end(), strides.begin(), strides.end());
}

class CallbackBackend final : public et::BackendInterface {
 public:
  CallbackBackend(std::string name, const Callbacks& callbacks)
      : name_(std::move(name)), callbacks_(callbacks) {}

  const char* name() const {
    return name_.c_str();
  }

  bool is_available() const override {
    return !closed.load();
  }

  et::Result<et::DelegateHandle*> init(
      et::BackendInitContext& context,
      et::FreeableBuffer* processed,
      ArrayRef<et::CompileSpec> compile_specs) const override {
    if (closed.load() || processed == nullptr) {
      return et::Error::InvalidState;
    }
    try {
      return load(context, *processed, compile_specs);
    } catch (...) {
      // Only allocation can throw here.
      return et::Error::MemoryAllocationFailed;
    }
  }

  et::Error execute(
      et::BackendExecutionContext& context,
      et::DelegateHandle* handle,
      et::Span<et::EValue*> args) const override {
    if (closed.load() || handle == nullptr) {
      return et::Error::InvalidState;
    }
    const auto& delegate = *static_cast<Delegate*>(handle);
    if (delegate.native_run != nullptr &&
        call_natively(delegate.native_run, delegate.native_model, args) == kDone) {
      return et::Error::Ok;
    }
    try {
      std::vector<int64_t> records;
      records.reserve(args.size() * (kFieldCount + 8));
      for (et::EValue* value : args) {
        append_record(value, records);
      }
      const StreamGuard guard;
      return static_cast<et::Error>(
          callbacks_.execute(
              handle, records.data(), records.size(), context.event_tracer()));
    } catch (...) {
      return et::Error::MemoryAllocationFailed;
    }
  }

  void destroy(et::DelegateHandle* handle) const override {
    if (handle == nullptr) {
      return;
    }
    if (!closed.load()) {
      const StreamGuard guard;
      callbacks_.destroy(handle);
    }
    // After the callback, which drops the views of the buffers freed here.
    delete static_cast<Delegate*>(handle);
  }

 private:
  et::Result<et::DelegateHandle*> load(
      et::BackendInitContext& context,
      et::FreeableBuffer& processed,
      ArrayRef<et::CompileSpec> compile_specs) const {
    const auto data = processed.data_safe();
    if (!data.ok()) {
      return data.error();
    }
    std::vector<SpecView> specs;
    for (const et::CompileSpec& spec : compile_specs) {
      specs.push_back(
          {spec.key == nullptr ? "" : spec.key,
           spec.value.buffer,
           spec.value.nbytes});
    }
    auto* const delegate = new Delegate;
    delegate->named_data = context.get_named_data_map();
    const char* const method = context.get_method_name();
    int32_t code = 0;
    {
      const StreamGuard guard;
      code = callbacks_.init(
          delegate,
          name_.c_str(),
          method == nullptr ? "" : method,
          data.get(),
          processed.size(),
          specs.data(),
          specs.size(),
          context.event_tracer() != nullptr);
    }
    delegate->named_data = nullptr;
    if (code != 0) {
      delete delegate;
      return static_cast<et::Error>(code);
    }
    return static_cast<et::DelegateHandle*>(delegate);
  }

  const std::string name_;
  const Callbacks callbacks_;
};

} // namespace

#define SHIM_EXPORT extern "C" __attribute__((visibility("default")))

SHIM_EXPORT int32_t coreml_shim_version() {
  return kInterfaceVersion;
}

// Whether a backend, ours or another, already has this name.
SHIM_EXPORT int32_t coreml_shim_has_backend(const char* name) {
  return et::get_backend_class(name) != nullptr ? 1 : 0;
}

SHIM_EXPORT int32_t
coreml_shim_register(const char* name, const Callbacks* callbacks) {
  if (name == nullptr || callbacks == nullptr ||
      callbacks->init == nullptr || callbacks->execute == nullptr ||
      callbacks->destroy == nullptr) {
    return static_cast<int32_t>(et::Error::InvalidArgument);
  }
  StreamGuard::real_out();
  StreamGuard::real_err();
  try {
    // The runtime keeps both pointers for the life of the process, without a way to release them.
    auto* const backend = new CallbackBackend(name, *callbacks);
    const et::Error error = et::register_backend({backend->name(), backend});
    if (error != et::Error::Ok) {
      delete backend;
    }
    return static_cast<int32_t>(error);
  } catch (...) {
    return static_cast<int32_t>(et::Error::MemoryAllocationFailed);
  }
}

// Only for init callbacks; the data stays valid until the delegate is destroyed.
SHIM_EXPORT int32_t coreml_shim_named_data(
    void* handle,
    const char* key,
    uint64_t key_length,
    const void** data,
    uint64_t* nbytes) {
  auto* const delegate = static_cast<Delegate*>(handle);
  if (delegate == nullptr || key == nullptr || data == nullptr ||
      nbytes == nullptr) {
    return static_cast<int32_t>(et::Error::InvalidArgument);
  }
  if (delegate->named_data == nullptr) {
    return static_cast<int32_t>(et::Error::NotFound);
  }
  try {
    auto buffer =
        delegate->named_data->get_data(std::string_view(key, key_length));
    if (!buffer.ok()) {
      return static_cast<int32_t>(buffer.error());
    }
    const auto pointer = buffer->data_safe();
    if (!pointer.ok()) {
      return static_cast<int32_t>(pointer.error());
    }
    *data = pointer.get();
    *nbytes = buffer->size();
    delegate->buffers.push_back(std::move(buffer.get()));
    return 0;
  } catch (...) {
    return static_cast<int32_t>(et::Error::MemoryAllocationFailed);
  }
}

// Only for init callbacks: later calls of the delegate use `run` where possible.
SHIM_EXPORT int32_t
coreml_shim_set_native(void* handle, NativeRun run, void* model) {
  auto* const delegate = static_cast<Delegate*>(handle);
  if (delegate == nullptr || run == nullptr) {
    return static_cast<int32_t>(et::Error::InvalidArgument);
  }
  delegate->native_run = run;
  delegate->native_model = model;
  return 0;
}

// Resizes an output tensor and writes its new record, kFieldCount + 2 * rank numbers.
SHIM_EXPORT int32_t coreml_shim_resize(
    void* evalue,
    const int32_t* sizes,
    uint64_t rank,
    int64_t* record) {
  auto* const value = static_cast<et::EValue*>(evalue);
  if (value == nullptr || !value->isTensor() || record == nullptr ||
      (rank > 0 && sizes == nullptr) ||
      static_cast<uint64_t>(value->toTensor().dim()) != rank) {
    return static_cast<int32_t>(et::Error::InvalidArgument);
  }
  static_assert(std::is_same_v<SizesType, int32_t>, "sizes are passed as is");
  const et::Error error =
      et::resize_tensor(value->toTensor(), ArrayRef<SizesType>(sizes, rank));
  if (error != et::Error::Ok) {
    return static_cast<int32_t>(error);
  }
  try {
    std::vector<int64_t> fields;
    append_record(value, fields);
    std::memcpy(record, fields.data(), fields.size() * sizeof(int64_t));
    return 0;
  } catch (...) {
    return static_cast<int32_t>(et::Error::MemoryAllocationFailed);
  }
}

// Whether a tracer requests the values of ops, in addition to times.
SHIM_EXPORT int32_t coreml_shim_wants_values(void* tracer) {
  return tracer != nullptr &&
      static_cast<et::EventTracer*>(tracer)->event_tracer_debug_level() >=
      et::EventTracerDebugLogLevel::kIntermediateOutputs;
}

// Only for execute callbacks, like the next function: logs one op of the delegate. Times are
// nanoseconds of the steady clock; the runtime's times have another origin.
SHIM_EXPORT int32_t coreml_shim_log_op(
    void* tracer,
    const char* symbol,
    uint64_t start,
    uint64_t end,
    const void* metadata,
    uint64_t nbytes) {
  if (tracer == nullptr || symbol == nullptr) {
    return static_cast<int32_t>(et::Error::InvalidArgument);
  }
  const auto now = std::chrono::duration_cast<std::chrono::nanoseconds>(
                       std::chrono::steady_clock::now().time_since_epoch())
                       .count();
  const et_timestamp_t ahead = et::pal_current_ticks() - static_cast<et_timestamp_t>(now);
  et::event_tracer_log_profiling_delegate(
      static_cast<et::EventTracer*>(tracer),
      symbol,
      static_cast<et::DebugHandle>(-1),
      start + ahead,
      end + ahead,
      metadata,
      nbytes);
  return 0;
}

// Logs a row-major tensor that an op has computed, copied into the tracer's buffer.
SHIM_EXPORT int32_t coreml_shim_log_value(
    void* tracer,
    const char* symbol,
    int32_t dtype,
    void* data,
    const int32_t* sizes,
    uint64_t rank) {
  if (tracer == nullptr || symbol == nullptr || (rank > 0 && sizes == nullptr)) {
    return static_cast<int32_t>(et::Error::InvalidArgument);
  }
  try {
    std::vector<int32_t> shape(sizes, sizes + rank);
    std::vector<executorch::aten::DimOrderType> order(rank);
    for (size_t axis = 0; axis < rank; ++axis) {
      order[axis] = static_cast<executorch::aten::DimOrderType>(axis);
    }
    std::vector<executorch::aten::StridesType> strides(rank);
    executorch::aten::StridesType stride = 1;
    for (size_t axis = rank; axis-- > 0;) {
      strides[axis] = stride;
      stride *= shape[axis];
    }
    executorch::aten::TensorImpl implementation(
        static_cast<executorch::aten::ScalarType>(dtype),
        static_cast<ssize_t>(rank),
        shape.data(),
        data,
        order.data(),
        strides.data());
    const auto logged =
        static_cast<et::EventTracer*>(tracer)->log_intermediate_output_delegate(
            symbol,
            static_cast<et::DebugHandle>(-1),
            Tensor(&implementation));
    return static_cast<int32_t>(logged.error());
  } catch (...) {
    return static_cast<int32_t>(et::Error::MemoryAllocationFailed);
  }
}

// Ends all callbacks; loaded delegates refuse to run afterwards.
SHIM_EXPORT void coreml_shim_close() {
  closed.store(true);
}
