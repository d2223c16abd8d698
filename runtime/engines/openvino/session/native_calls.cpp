// Calls of a compiled model without Python, through OpenVINO's C library.
//
// A call is given the addresses of its tensors. Small ones are copied; large ones are bound, and
// stay bound for as long as the caller passes the same memory. What a call cannot do here it leaves
// to the caller, who has another way: it says so, and has changed nothing.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <openvino/c/openvino.h>

namespace {

// --- The interface; native_calls.py holds the other side of it. ---------------------------------

// An input or output of the model, in the order in which calls pass it.
struct PortSpec {
  int32_t index; // of the model
  int32_t type; // ov_element_type_e
  int64_t rank;
  const int64_t* sizes;
};

// A contiguous tensor of a call.
struct Argument {
  void* data;
  const int32_t* sizes;
  int32_t rank;
  int32_t type; // c10::ScalarType
};

constexpr int32_t kInterfaceVersion = 1;
constexpr int32_t kDone = 0;
constexpr int32_t kNotHere = 1; // another type, shape or number of tensors, or a value out of range
constexpr int32_t kFailed = 2; // OpenVINO failed

// Binding costs about a microsecond, as copying this much does.
constexpr size_t kCopied = size_t{1} << 14;

// --- Types --------------------------------------------------------------------------------------

constexpr int32_t kLong = 4; // c10::ScalarType

ov_element_type_e element_type(int32_t scalar_type) {
  switch (scalar_type) {
    case 0:
      return U8;
    case 1:
      return I8;
    case 2:
      return I16;
    case 3:
      return I32;
    case kLong:
      return I64;
    case 5:
      return F16;
    case 6:
      return F32;
    case 7:
      return F64;
    case 11:
      return BOOLEAN;
    default:
      return DYNAMIC;
  }
}

size_t size_of(ov_element_type_e type) {
  switch (type) {
    case U8:
    case I8:
    case BOOLEAN:
      return 1;
    case I16:
    case F16:
      return 2;
    case I32:
    case F32:
      return 4;
    case I64:
    case F64:
      return 8;
    default:
      return 0;
  }
}

struct Port {
  size_t index = 0;
  ov_element_type_e type = DYNAMIC;
  std::vector<int64_t> sizes;
  size_t count = 1;
  size_t bytes = 0;
};

Port port_of(const PortSpec& spec) {
  Port port;
  port.index = static_cast<size_t>(spec.index);
  port.type = static_cast<ov_element_type_e>(spec.type);
  port.sizes.assign(spec.sizes, spec.sizes + spec.rank);
  for (const int64_t size : port.sizes) {
    port.count *= static_cast<size_t>(size);
  }
  port.bytes = port.count * size_of(port.type);
  return port;
}

// Core ML's widest integers have 32 bits; programs have 64.
bool is_widened(const Port& port, const Argument& argument) {
  return port.type == I32 && argument.type == kLong;
}

bool fits(const Port& port, const Argument& argument) {
  if (argument.data == nullptr && port.bytes > 0) {
    return false;
  }
  if (element_type(argument.type) != port.type && !is_widened(port, argument)) {
    return false;
  }
  // A tensor of one element stands for a scalar.
  if (argument.rank == 0 && port.sizes.size() == 1 && port.sizes[0] == 1) {
    return true;
  }
  if (static_cast<size_t>(argument.rank) != port.sizes.size()) {
    return false;
  }
  for (size_t n = 0; n < port.sizes.size(); ++n) {
    if (argument.sizes[n] != port.sizes[n]) {
      return false;
    }
  }
  return true;
}

bool narrow(const void* from, void* to, size_t count) {
  const auto* const wide = static_cast<const int64_t*>(from);
  auto* const narrow = static_cast<int32_t*>(to);
  for (size_t n = 0; n < count; ++n) {
    if (wide[n] < std::numeric_limits<int32_t>::min() ||
        wide[n] > std::numeric_limits<int32_t>::max()) {
      return false;
    }
    narrow[n] = static_cast<int32_t>(wide[n]);
  }
  return true;
}

void widen(const void* from, void* to, size_t count) {
  const auto* const narrow = static_cast<const int32_t*>(from);
  auto* const wide = static_cast<int64_t*>(to);
  for (size_t n = 0; n < count; ++n) {
    wide[n] = narrow[n];
  }
}

// --- Requests -----------------------------------------------------------------------------------

struct FreeTensor {
  void operator()(ov_tensor_t* tensor) const {
    ov_tensor_free(tensor);
  }
};
using TensorPointer = std::unique_ptr<ov_tensor_t, FreeTensor>;

// The memory at a port: its own, or that of a caller.
struct Slot {
  TensorPointer own;
  void* own_data = nullptr;
  TensorPointer bound;
  const void* bound_data = nullptr; // what the request reads or writes now
};

class Request {
 public:
  ~Request() {
    if (request_ != nullptr) {
      ov_infer_request_free(request_);
    }
  }
  Request() = default;
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  bool create(const ov_compiled_model_t* model, size_t ports) {
    slots_.resize(ports);
    return ov_compiled_model_create_infer_request(model, &request_) == OK;
  }

  // Returns the port's own memory, bound; null if OpenVINO fails.
  void* own(const Port& port, size_t slot, bool is_input) {
    Slot& at = slots_[slot];
    if (at.own == nullptr) {
      ov_tensor_t* tensor = nullptr;
      const ov_shape_t shape = shape_of(port);
      if (ov_tensor_create(port.type, shape, &tensor) != OK) {
        return nullptr;
      }
      at.own.reset(tensor);
      if (ov_tensor_data(tensor, &at.own_data) != OK) {
        return nullptr;
      }
    }
    if (at.bound_data != at.own_data && !set(port, at.own.get(), is_input)) {
      return nullptr;
    }
    at.bound_data = at.own_data;
    return at.own_data;
  }

  bool bind(const Port& port, size_t slot, bool is_input, void* data) {
    Slot& at = slots_[slot];
    if (at.bound_data == data) {
      return true;
    }
    ov_tensor_t* tensor = nullptr;
    if (ov_tensor_create_from_host_ptr(port.type, shape_of(port), data, &tensor) != OK) {
      return false;
    }
    TensorPointer made(tensor);
    if (!set(port, tensor, is_input)) {
      return false;
    }
    at.bound = std::move(made);
    at.bound_data = data;
    return true;
  }

  bool infer(bool alone) {
    if (!alone) {
      return ov_infer_request_infer(request_) == OK;
    }
    // With one thread, infer loses errors (OpenVINO 2026.4).
    return ov_infer_request_start_async(request_) == OK && ov_infer_request_wait(request_) == OK;
  }

 private:
  static ov_shape_t shape_of(const Port& port) {
    return {static_cast<int64_t>(port.sizes.size()), const_cast<int64_t*>(port.sizes.data())};
  }

  bool set(const Port& port, const ov_tensor_t* tensor, bool is_input) {
    return (is_input
                ? ov_infer_request_set_input_tensor_by_index(request_, port.index, tensor)
                : ov_infer_request_set_output_tensor_by_index(request_, port.index, tensor)) == OK;
  }

  ov_infer_request_t* request_ = nullptr;
  std::vector<Slot> slots_;
};

class Model {
 public:
  Model(std::vector<Port> inputs, std::vector<Port> outputs, bool alone)
      : inputs_(std::move(inputs)), outputs_(std::move(outputs)), alone_(alone) {}
  ~Model() {
    idle_.clear();
    if (compiled_ != nullptr) {
      ov_compiled_model_free(compiled_);
    }
  }
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  bool import(const ov_core_t* core, const char* device, const char* content, size_t size) {
    if (ov_core_import_model(core, content, size, device, &compiled_) != OK) {
      return false;
    }
    std::unique_ptr<Request> first = take();
    if (first == nullptr) {
      return false;
    }
    give_back(std::move(first));
    return true;
  }

  int32_t run(const Argument* arguments, size_t count) {
    if (count != inputs_.size() + outputs_.size()) {
      return kNotHere;
    }
    for (size_t n = 0; n < count; ++n) {
      if (!fits(port(n), arguments[n])) {
        return kNotHere;
      }
    }
    std::unique_ptr<Request> request = take();
    if (request == nullptr) {
      return kFailed;
    }
    const int32_t code = run_on(*request, arguments, count);
    // One that failed is not used again.
    if (code != kFailed) {
      give_back(std::move(request));
    }
    return code;
  }

 private:
  const Port& port(size_t n) const {
    return n < inputs_.size() ? inputs_[n] : outputs_[n - inputs_.size()];
  }

  static bool is_copied(const Port& port, const Argument& argument) {
    return port.bytes <= kCopied || is_widened(port, argument);
  }

  int32_t run_on(Request& request, const Argument* arguments, size_t count) {
    for (size_t n = 0; n < count; ++n) {
      const Port& at = port(n);
      const Argument& argument = arguments[n];
      const bool is_input = n < inputs_.size();
      if (!is_copied(at, argument)) {
        if (!request.bind(at, n, is_input, argument.data)) {
          return kFailed;
        }
        continue;
      }
      void* const memory = request.own(at, n, is_input);
      if (memory == nullptr && at.bytes > 0) {
        return kFailed;
      }
      if (!is_input) {
        continue;
      }
      if (!is_widened(at, argument)) {
        std::memcpy(memory, argument.data, at.bytes);
      } else if (!narrow(argument.data, memory, at.count)) {
        return kNotHere;
      }
    }
    if (!request.infer(alone_)) {
      return kFailed;
    }
    for (size_t n = inputs_.size(); n < count; ++n) {
      const Port& at = port(n);
      const Argument& argument = arguments[n];
      if (!is_copied(at, argument)) {
        continue;
      }
      const void* const memory = request.own(at, n, false);
      if (is_widened(at, argument)) {
        widen(memory, argument.data, at.count);
      } else {
        std::memcpy(argument.data, memory, at.bytes);
      }
    }
    return kDone;
  }

  std::unique_ptr<Request> take() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!idle_.empty()) {
        std::unique_ptr<Request> request = std::move(idle_.back());
        idle_.pop_back();
        return request;
      }
    }
    auto made = std::make_unique<Request>();
    return made->create(compiled_, inputs_.size() + outputs_.size()) ? std::move(made) : nullptr;
  }

  void give_back(std::unique_ptr<Request> request) {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(request));
  }

  const std::vector<Port> inputs_;
  const std::vector<Port> outputs_;
  const bool alone_;
  ov_compiled_model_t* compiled_ = nullptr;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Request>> idle_; // as many as calls ran at once
};

// One core for each configuration, for the life of the process: importing takes no configuration.
const ov_core_t* core_of(const char* device, const char* const* config, size_t pairs) {
  static std::mutex mutex;
  static std::map<std::string, ov_core_t*> cores;
  std::string key = device;
  for (size_t n = 0; n < 2 * pairs; ++n) {
    key += '\n';
    key += config[n];
  }
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = cores.find(key);
  if (found != cores.end()) {
    return found->second;
  }
  ov_core_t* core = nullptr;
  if (ov_core_create(&core) != OK) {
    return nullptr;
  }
  for (size_t n = 0; n < pairs; ++n) {
    if (ov_core_set_property(core, device, config[2 * n], config[2 * n + 1]) != OK) {
      ov_core_free(core);
      return nullptr;
    }
  }
  cores.emplace(std::move(key), core);
  return core;
}

} // namespace

#define NATIVE_EXPORT extern "C" __attribute__((visibility("default")))

NATIVE_EXPORT int32_t coreml_native_version() {
  return kInterfaceVersion;
}

// Returns a model, or null with OpenVINO's message in `error`. The content has to stay as long as
// the model does: constants are read from it.
NATIVE_EXPORT void* coreml_native_load(
    const char* content,
    uint64_t size,
    const char* device,
    const char* const* config,
    uint64_t pairs,
    const PortSpec* ports,
    uint64_t inputs,
    uint64_t outputs,
    int32_t alone,
    char* error,
    uint64_t error_size) {
  try {
    std::vector<Port> taken;
    std::vector<Port> given;
    for (uint64_t n = 0; n < inputs + outputs; ++n) {
      (n < inputs ? taken : given).push_back(port_of(ports[n]));
    }
    auto model = std::make_unique<Model>(std::move(taken), std::move(given), alone != 0);
    const ov_core_t* const core = core_of(device, config, pairs);
    if (core != nullptr && model->import(core, device, content, size)) {
      return model.release();
    }
    const char* const message = ov_get_last_err_msg();
    std::snprintf(error, error_size, "%s", message == nullptr ? "" : message);
    ov_free(message);
  } catch (...) {
    std::snprintf(error, error_size, "not enough memory");
  }
  return nullptr;
}

NATIVE_EXPORT void coreml_native_free(void* model) {
  delete static_cast<Model*>(model);
}

// Runs once: `arguments` are the inputs, then the outputs. May be called by several threads.
NATIVE_EXPORT int32_t
coreml_native_run(void* model, const Argument* arguments, uint64_t count) {
  try {
    return static_cast<Model*>(model)->run(arguments, count);
  } catch (...) {
    return kFailed;
  }
}
