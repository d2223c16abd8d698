// Calls of a compiled function without Python, through OpenVINO's C library.
//
// A function has one model, or one for each of its enumerated shapes. A call passes addresses of
// tensors. Small tensors are copied; large tensors are bound, and stay bound as long as the caller
// passes the same memory. If a call is impossible here, its result says so, nothing has changed,
// and the caller has to run the function in another way.

#include "native_calls.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <openvino/c/openvino.h>

namespace {

constexpr int64_t kOpen = -1; // a size that each call brings, or a limit that there is not

// Bytes up to which tensors are copied. Copying as much takes about a microsecond, as binding does.
constexpr size_t kCopied = size_t{1} << 14;

using Sizes = std::vector<int64_t>;

// --- Descriptions -------------------------------------------------------------------------------

// Reads the numbers that describe a function or a model; native_calls.py writes them.
class Words {
 public:
  Words(const int64_t* words, uint64_t count) : at_(words), end_(words + count) {}

  int64_t next() {
    if (at_ == end_) {
      throw std::runtime_error("the description is too short");
    }
    return *at_++;
  }

  // The number of following items, each of which takes at least one word.
  size_t count() {
    const int64_t count = next();
    if (count < 0 || count > end_ - at_) {
      throw std::runtime_error("the description is too short");
    }
    return static_cast<size_t>(count);
  }

  Sizes sizes() {
    Sizes read(count());
    for (int64_t& size : read) {
      size = next();
    }
    return read;
  }

 private:
  const int64_t* at_;
  const int64_t* end_;
};

// The sizes that a dimension of an input may have.
struct Limit {
  int64_t low;
  int64_t high;
  // The dimension that must have the same size; no dimension if the input is kOpen.
  int64_t same_input;
  int64_t same_axis;
};

struct InputLimits {
  bool any_rank;
  std::vector<Limit> axes;
};

struct Port {
  size_t index = 0;
  ov_element_type_e type = DYNAMIC;
  Sizes sizes;
  // Whether an output is copied from OpenVINO's memory, because its size is not known before the
  // call, or because it must not be bound.
  bool is_fetched = false;
};

struct RowWrite {
  int64_t axis;
  size_t places; // output with the numbers of the rows, i32
  size_t rows; // output with the rows
};

struct StatePorts {
  Port input;
  bool has_rows;
  Port output; // of the new value, if the state is replaced
  std::vector<RowWrite> writes;
};

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

template <typename Size, typename Rank>
size_t count_of(const Size* sizes, Rank rank) {
  size_t count = 1;
  for (Rank n = 0; n < rank; ++n) {
    count *= static_cast<size_t>(sizes[n]);
  }
  return count;
}

size_t count_of(const Sizes& sizes) {
  return count_of(sizes.data(), sizes.size());
}

// Whether the tensor's type differs from the model's: programs may have 64-bit integers or single
// precision where Core ML has 32-bit integers or half precision.
bool is_converted(const Port& port, const NativeArgument& argument) {
  return element_type(argument.type) != port.type;
}

bool has_type(const Port& port, const NativeArgument& argument) {
  const ov_element_type_e type = element_type(argument.type);
  return type == port.type || (port.type == I32 && type == I64) ||
      (port.type == F16 && type == F32) || (port.type == F32 && type == F16);
}

bool has_sizes(const NativeArgument& argument, const int64_t* sizes, size_t rank) {
  // [1] is accepted for a scalar.
  if (argument.rank == 0 && rank == 1 && sizes[0] == 1) {
    return true;
  }
  if (static_cast<size_t>(argument.rank) != rank) {
    return false;
  }
  for (size_t n = 0; n < rank; ++n) {
    if (argument.sizes[n] != sizes[n] && sizes[n] != kOpen) {
      return false;
    }
  }
  return true;
}

template <typename To, typename From>
To bits_of(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float to_float(uint16_t half) {
  // The exponent's bias differs by 112; subnormal numbers are right too.
  const uint32_t magnitude = uint32_t{half & 0x7FFFu} << 13;
  uint32_t bits = bits_of<uint32_t>(bits_of<float>(magnitude) * 0x1p112f);
  bits |= (half & 0x7C00u) == 0x7C00u ? 0x7F800000u : 0u; // infinity and NaN stay what they are
  return bits_of<float>(bits | uint32_t{half & 0x8000u} << 16);
}

// Rounds to nearest, ties to even.
uint16_t to_half(float value) {
  const uint32_t bits = bits_of<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  uint32_t half = 0;
  if (magnitude > 0x7F800000u) {
    half = 0x7E00u | (magnitude >> 13 & 0x1FFu); // NaN
  } else if (magnitude >= 0x47800000u) { // 2**16
    half = 0x7C00u;
  } else if (magnitude < 0x38800000u) { // 2**-14, below which numbers are subnormal
    half = bits_of<uint32_t>(bits_of<float>(magnitude) + 0.5f) - 0x3F000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
}

template <typename From, typename To, typename Convert>
void convert(const void* from, void* to, size_t count, Convert one) {
  const auto* const source = static_cast<const From*>(from);
  auto* const target = static_cast<To*>(to);
  for (size_t n = 0; n < count; ++n) {
    target[n] = one(source[n]);
  }
}

// Copies an input to the model's memory; returns false if an integer is out of range.
bool copy_in(const Port& port, const NativeArgument& argument, void* memory, size_t count) {
  if (count == 0) {
    return true;
  }
  if (!is_converted(port, argument)) {
    std::memcpy(memory, argument.data, count * size_of(port.type));
  } else if (port.type == F16) {
    convert<float, uint16_t>(argument.data, memory, count, to_half);
  } else if (port.type == F32) {
    convert<uint16_t, float>(argument.data, memory, count, to_float);
  } else {
    const auto* const wide = static_cast<const int64_t*>(argument.data);
    for (size_t n = 0; n < count; ++n) {
      if (wide[n] < std::numeric_limits<int32_t>::min() ||
          wide[n] > std::numeric_limits<int32_t>::max()) {
        return false;
      }
      static_cast<int32_t*>(memory)[n] = static_cast<int32_t>(wide[n]);
    }
  }
  return true;
}

// Copies an output from the model's memory.
void copy_out(const Port& port, const void* memory, const NativeArgument& argument, size_t count) {
  if (count == 0) {
    return;
  }
  if (!is_converted(port, argument)) {
    std::memcpy(argument.data, memory, count * size_of(port.type));
  } else if (port.type == F16) {
    convert<uint16_t, float>(memory, argument.data, count, to_float);
  } else if (port.type == F32) {
    convert<float, uint16_t>(memory, argument.data, count, to_half);
  } else {
    convert<int32_t, int64_t>(memory, argument.data, count, [](int32_t value) {
      return int64_t{value};
    });
  }
}

// --- Requests -----------------------------------------------------------------------------------

struct FreeTensor {
  void operator()(ov_tensor_t* tensor) const {
    ov_tensor_free(tensor);
  }
};
using TensorPointer = std::unique_ptr<ov_tensor_t, FreeTensor>;

ov_shape_t shape_of(const Sizes& sizes) {
  return {static_cast<int64_t>(sizes.size()), const_cast<int64_t*>(sizes.data())};
}

// A tensor that the request reads or writes, and its address.
struct Memory {
  TensorPointer tensor;
  const void* data = nullptr;
  Sizes sizes;
};

// The memory that may be bound to a port: its own, and two addresses of a caller, as of states.
struct Slot {
  Memory own;
  Memory given[2];
  const Memory* bound = nullptr;
};

// A result in OpenVINO's memory.
struct Fetched {
  TensorPointer tensor;
  void* data = nullptr;
  ov_element_type_e type = DYNAMIC;
  Sizes sizes;
};

using Compiled = std::shared_ptr<ov_compiled_model_t>;

class Request {
 public:
  ~Request() {
    slots_.clear();
    if (request_ != nullptr) {
      ov_infer_request_free(request_);
    }
  }
  Request() = default;
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  bool create(Compiled model, size_t slots) {
    compiled = std::move(model);
    slots_.resize(slots);
    return ov_compiled_model_create_infer_request(compiled.get(), &request_) == OK;
  }

  // Binds the port's own memory. The address is null for a tensor without elements.
  bool own(const Port& port, size_t slot, bool is_input, const Sizes& sizes, void*& data) {
    Slot& at = slots_[slot];
    data = const_cast<void*>(at.own.data);
    if (at.own.tensor == nullptr || at.own.sizes != sizes) {
      ov_tensor_t* tensor = nullptr;
      if (ov_tensor_create(port.type, shape_of(sizes), &tensor) != OK) {
        return false;
      }
      TensorPointer made(tensor);
      // OpenVINO has no address for a tensor without elements.
      data = nullptr;
      if ((count_of(sizes) > 0 && ov_tensor_data(tensor, &data) != OK) ||
          !set(port, tensor, is_input)) {
        return false;
      }
      at.own = {std::move(made), data, sizes};
    } else if (at.bound != &at.own && !set(port, at.own.tensor.get(), is_input)) {
      return false;
    }
    at.bound = &at.own;
    return true;
  }

  bool bind(const Port& port, size_t slot, bool is_input, void* data, const Sizes& sizes) {
    Slot& at = slots_[slot];
    for (Memory& memory : at.given) {
      if (memory.data != data || memory.tensor == nullptr || memory.sizes != sizes) {
        continue;
      }
      if (at.bound != &memory && !set(port, memory.tensor.get(), is_input)) {
        return false;
      }
      at.bound = &memory;
      return true;
    }
    ov_tensor_t* tensor = nullptr;
    if (ov_tensor_create_from_host_ptr(port.type, shape_of(sizes), data, &tensor) != OK) {
      return false;
    }
    TensorPointer made(tensor);
    if (!set(port, tensor, is_input)) {
      return false;
    }
    Memory& free = at.given[at.bound == &at.given[0] ? 1 : 0];
    free = {std::move(made), data, sizes};
    at.bound = &free;
    return true;
  }

  bool fetch(size_t index, Fetched& found) {
    ov_tensor_t* tensor = nullptr;
    if (ov_infer_request_get_output_tensor_by_index(request_, index, &tensor) != OK) {
      return false;
    }
    found.tensor.reset(tensor);
    void* data = nullptr;
    ov_shape_t shape{};
    if (ov_tensor_get_shape(tensor, &shape) != OK) {
      return false;
    }
    found.sizes.assign(shape.dims, shape.dims + shape.rank);
    ov_shape_free(&shape);
    if (ov_tensor_get_element_type(tensor, &found.type) != OK ||
        (count_of(found.sizes) > 0 && ov_tensor_data(tensor, &data) != OK)) {
      return false;
    }
    found.data = data;
    return true;
  }

  bool infer(bool alone) {
    if (!alone) {
      return ov_infer_request_infer(request_) == OK;
    }
    // With one thread, infer loses errors (OpenVINO 2026.4).
    return ov_infer_request_start_async(request_) == OK && ov_infer_request_wait(request_) == OK;
  }

  Compiled compiled; // the model of the request

  // Of the current call: its arguments, and the sizes of the current argument.
  std::vector<NativeArgument> arguments;
  Sizes sizes;

 private:
  bool set(const Port& port, const ov_tensor_t* tensor, bool is_input) {
    return (is_input
                ? ov_infer_request_set_input_tensor_by_index(request_, port.index, tensor)
                : ov_infer_request_set_output_tensor_by_index(request_, port.index, tensor)) == OK;
  }

  ov_infer_request_t* request_ = nullptr;
  std::vector<Slot> slots_;
};

// --- Models -------------------------------------------------------------------------------------

struct Caller {
  NativeResize resize;
  void* context;
  NativeState* state;
};

class Model {
 public:
  explicit Model(Words& words) : alone_(words.next() != 0) {
    inputs_ = read_ports(words);
    outputs_ = read_ports(words);
    for (const Port& output : outputs_) {
      if (!output.is_fetched && is_open(output)) {
        throw std::runtime_error("an output of open sizes that is not fetched");
      }
    }
    states_.resize(words.count());
    for (StatePorts& state : states_) {
      state.input = read_port(words);
      if (is_open(state.input)) {
        throw std::runtime_error("a state of open sizes");
      }
      state.has_rows = words.next() != 0;
      if (!state.has_rows) {
        state.output = state.input;
        state.output.index = static_cast<size_t>(words.next());
        continue;
      }
      state.writes.resize(words.count());
      for (RowWrite& write : state.writes) {
        write.axis = words.next();
        write.places = static_cast<size_t>(words.next());
        write.rows = static_cast<size_t>(words.next());
        if (write.axis < 0 || static_cast<size_t>(write.axis) >= state.input.sizes.size()) {
          throw std::runtime_error("rows of an axis that there is not");
        }
      }
    }
  }
  ~Model() = default;
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  // The content must outlive the model.
  bool import(const ov_core_t* core, const char* device, const char* content, size_t size) {
    core_ = core;
    device_ = device;
    content_ = content;
    size_ = size;
    compiled_ = load();
    std::unique_ptr<Request> first = compiled_ == nullptr ? nullptr : take();
    if (first == nullptr) {
      return false;
    }
    give_back(std::move(first));
    return true;
  }

  // Whether the model accepts these tensors; sizes of outputs are not compared.
  bool fits(const NativeArgument* arguments, size_t count) const {
    if (count != inputs_.size() + outputs_.size()) {
      return false;
    }
    for (size_t n = 0; n < count; ++n) {
      const Port& at = port(n);
      const NativeArgument& argument = arguments[n];
      if (!has_type(at, argument)) {
        return false;
      }
      if (n >= inputs_.size()) {
        continue;
      }
      if (!has_sizes(argument, at.sizes.data(), at.sizes.size()) ||
          (argument.data == nullptr && count_of(argument.sizes, argument.rank) > 0)) {
        return false;
      }
    }
    return true;
  }

  const std::vector<StatePorts>& states() const {
    return states_;
  }

  // Whether both models have states of the same types, sizes and kinds of writes.
  bool has_states_of(const Model& other) const {
    return std::equal(
        states_.begin(), states_.end(), other.states_.begin(), other.states_.end(),
        [](const StatePorts& one, const StatePorts& two) {
          return one.input.type == two.input.type && one.input.sizes == two.input.sizes &&
              one.has_rows == two.has_rows;
        });
  }

  int32_t run(const NativeArgument* arguments, size_t count, const Caller& caller) {
    if ((caller.state == nullptr) != states_.empty()) {
      return kNotHere;
    }
    for (size_t n = 0; n < states_.size(); ++n) {
      if ((caller.state->has_rows[n] != 0) != states_[n].has_rows) {
        return kNotHere;
      }
    }
    std::unique_ptr<Request> request = take();
    if (request == nullptr) {
      return kFailed;
    }
    request->arguments.assign(arguments, arguments + count);
    const int32_t code = run_on(*request, caller);
    // A request that failed is not reused.
    if (code != kFailed) {
      give_back(std::move(request));
    } else if (std::any_of(inputs_.begin(), inputs_.end(), is_open)) {
      renew(request->compiled);
    }
    return code;
  }

 private:
  static bool is_open(const Port& port) {
    return std::find(port.sizes.begin(), port.sizes.end(), kOpen) != port.sizes.end();
  }

  static Port read_port(Words& words) {
    Port port;
    port.index = static_cast<size_t>(words.next());
    port.type = static_cast<ov_element_type_e>(words.next());
    port.is_fetched = words.next() != 0;
    port.sizes = words.sizes();
    for (const int64_t size : port.sizes) {
      if (size < kOpen) {
        throw std::runtime_error("a size that is negative");
      }
    }
    return port;
  }

  static std::vector<Port> read_ports(Words& words) {
    std::vector<Port> ports(words.count());
    for (Port& port : ports) {
      port = read_port(words);
    }
    return ports;
  }

  const Port& port(size_t n) const {
    return n < inputs_.size() ? inputs_[n] : outputs_[n - inputs_.size()];
  }

  static bool is_copied(const Port& port, const NativeArgument& argument, size_t count) {
    return count * size_of(port.type) <= kCopied || is_converted(port, argument);
  }

  // Sets the sizes of a tensor in the model's form, where a scalar is [1].
  static void set_sizes(const Port& port, const NativeArgument& argument, Sizes& sizes) {
    sizes.assign(argument.sizes, argument.sizes + argument.rank);
    sizes.resize(port.sizes.size(), 1);
  }

  int32_t run_on(Request& request, const Caller& caller) {
    int32_t code = set_inputs(request);
    if (code == kDone) {
      code = set_outputs(request, caller);
    }
    if (code != kDone) {
      return code;
    }
    if (!bind_states(request, caller.state) || !request.infer(alone_)) {
      return kFailed;
    }
    code = take_outputs(request, caller);
    return code == kDone && caller.state != nullptr ? advance(request, *caller.state) : code;
  }

  int32_t set_inputs(Request& request) {
    for (size_t n = 0; n < inputs_.size(); ++n) {
      const Port& at = inputs_[n];
      const NativeArgument& argument = request.arguments[n];
      set_sizes(at, argument, request.sizes);
      const size_t count = count_of(request.sizes);
      if (!is_copied(at, argument, count)) {
        if (!request.bind(at, n, true, argument.data, request.sizes)) {
          return kFailed;
        }
        continue;
      }
      void* memory = nullptr;
      if (!request.own(at, n, true, request.sizes, memory)) {
        return kFailed;
      }
      if (!copy_in(at, argument, memory, count)) {
        return kNotHere;
      }
    }
    return kDone;
  }

  int32_t set_outputs(Request& request, const Caller& caller) {
    for (size_t n = 0; n < outputs_.size(); ++n) {
      const Port& at = outputs_[n];
      if (at.is_fetched) {
        continue;
      }
      const size_t position = inputs_.size() + n;
      NativeArgument& argument = request.arguments[position];
      if (!make_fit(argument, position, at.sizes, caller)) {
        return kNotHere;
      }
      const size_t count = count_of(at.sizes);
      if (is_copied(at, argument, count)) {
        void* memory = nullptr;
        if (!request.own(at, position, false, at.sizes, memory)) {
          return kFailed;
        }
      } else if (!request.bind(at, position, false, argument.data, at.sizes)) {
        return kFailed;
      }
    }
    return kDone;
  }

  // Resizes an output to `sizes` if it has other sizes or no memory.
  static bool make_fit(
      NativeArgument& argument, size_t n, const Sizes& sizes, const Caller& caller) {
    const bool has_memory = argument.data != nullptr || count_of(sizes) == 0;
    if (has_memory && has_sizes(argument, sizes.data(), sizes.size())) {
      return true;
    }
    if (caller.resize == nullptr || static_cast<size_t>(argument.rank) != sizes.size()) {
      return false;
    }
    argument.data = caller.resize(caller.context, n, sizes.data(), sizes.size());
    return argument.data != nullptr || count_of(sizes) == 0;
  }

  bool bind_states(Request& request, const NativeState* state) {
    size_t slot = inputs_.size() + outputs_.size();
    for (size_t n = 0; n < states_.size(); ++n, slot += 2) {
      const StatePorts& at = states_[n];
      void* const read = state->memory[state->side][n];
      void* const written = state->memory[1 - state->side][n];
      if (!request.bind(at.input, slot, true, read, at.input.sizes) ||
          (!at.has_rows &&
           !request.bind(at.output, slot + 1, false, written, at.input.sizes))) {
        return false;
      }
    }
    return true;
  }

  int32_t take_outputs(Request& request, const Caller& caller) {
    Fetched found;
    for (size_t n = 0; n < outputs_.size(); ++n) {
      const Port& at = outputs_[n];
      const size_t position = inputs_.size() + n;
      NativeArgument& argument = request.arguments[position];
      void* memory = nullptr;
      const Sizes* sizes = &at.sizes;
      if (at.is_fetched) {
        if (!request.fetch(at.index, found)) {
          return kFailed;
        }
        if (found.type != at.type || !make_fit(argument, position, found.sizes, caller)) {
          return kNotHere;
        }
        memory = found.data;
        sizes = &found.sizes;
      } else if (is_copied(at, argument, count_of(at.sizes))) {
        if (!request.own(at, position, false, at.sizes, memory)) {
          return kFailed;
        }
      } else {
        continue;
      }
      copy_out(at, memory, argument, count_of(*sizes));
    }
    return kDone;
  }

  // Swaps the states after a call, and writes the rows that it returned.
  int32_t advance(Request& request, NativeState& state) {
    struct Update {
      const StatePorts* ports;
      const RowWrite* write;
      char* target;
      Fetched places;
      Fetched rows;
    };
    std::vector<Update> updates;
    for (size_t n = 0; n < states_.size(); ++n) {
      for (const RowWrite& write : states_[n].writes) {
        Update update{
            &states_[n], &write, static_cast<char*>(state.memory[state.side][n]), {}, {}};
        if (!request.fetch(write.places, update.places) ||
            !request.fetch(write.rows, update.rows) || !is_writable(update.ports->input, write,
                update.places, update.rows)) {
          return kFailed;
        }
        updates.push_back(std::move(update));
      }
    }
    for (const Update& update : updates) {
      write_rows(
          update.ports->input, *update.write, update.target, update.places, update.rows);
    }
    state.side = 1 - state.side;
    return kDone;
  }

  static bool is_writable(
      const Port& state, const RowWrite& write, const Fetched& places, const Fetched& rows) {
    const auto axis = static_cast<size_t>(write.axis);
    const size_t count = count_of(places.sizes);
    Sizes expected = state.sizes;
    expected[axis] = static_cast<int64_t>(count);
    if (places.type != I32 || rows.sizes != expected ||
        (rows.type != state.type && !(rows.type == F16 && state.type == F32))) {
      return false;
    }
    const auto* const numbers = static_cast<const int32_t*>(places.data);
    for (size_t n = 0; n < count; ++n) {
      if (numbers[n] < 0 || numbers[n] >= state.sizes[axis]) {
        return false;
      }
    }
    return true;
  }

  static void write_rows(
      const Port& state,
      const RowWrite& write,
      char* target,
      const Fetched& places,
      const Fetched& rows) {
    const auto axis = static_cast<size_t>(write.axis);
    const size_t outer = count_of(state.sizes.data(), axis);
    const size_t inner =
        count_of(state.sizes.data() + axis + 1, state.sizes.size() - axis - 1);
    const auto total = static_cast<size_t>(state.sizes[axis]);
    const size_t count = count_of(places.sizes);
    const auto* const numbers = static_cast<const int32_t*>(places.data);
    const auto* const source = static_cast<const char*>(rows.data);
    const bool is_converted = rows.type != state.type;
    for (size_t o = 0; o < outer; ++o) {
      for (size_t n = 0; n < count; ++n) {
        const size_t to = (o * total + static_cast<size_t>(numbers[n])) * inner;
        const size_t from = (o * count + n) * inner;
        if (is_converted) {
          convert<uint16_t, float>(
              reinterpret_cast<const uint16_t*>(source) + from,
              reinterpret_cast<float*>(target) + to,
              inner,
              to_float);
        } else {
          const size_t size = size_of(state.type);
          std::memcpy(target + to * size, source + from * size, inner * size);
        }
      }
    }
  }

  std::unique_ptr<Request> take() {
    Compiled compiled;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!idle_.empty()) {
        std::unique_ptr<Request> request = std::move(idle_.back());
        idle_.pop_back();
        return request;
      }
      compiled = compiled_;
    }
    auto made = std::make_unique<Request>();
    const size_t slots = inputs_.size() + outputs_.size() + 2 * states_.size();
    return made->create(compiled, slots) ? std::move(made) : nullptr;
  }

  void give_back(std::unique_ptr<Request> request) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (request->compiled == compiled_) {
      idle_.push_back(std::move(request));
    }
  }

  Compiled load() const {
    ov_compiled_model_t* made = nullptr;
    if (ov_core_import_model(core_, content_, size_, device_.c_str(), &made) != OK) {
      return nullptr;
    }
    return {made, ov_compiled_model_free};
  }

  // After a call that failed, OpenVINO 2026.4 may refuse sizes that it took before.
  void renew(const Compiled& failed) {
    Compiled made = load();
    const std::lock_guard<std::mutex> lock(mutex_);
    if (made != nullptr && compiled_ == failed) {
      compiled_ = std::move(made);
      idle_.clear();
    }
  }

  std::vector<Port> inputs_;
  std::vector<Port> outputs_;
  std::vector<StatePorts> states_;
  const bool alone_; // whether a call has one thread
  const ov_core_t* core_ = nullptr;
  std::string device_;
  const char* content_ = nullptr;
  size_t size_ = 0;
  std::mutex mutex_;
  Compiled compiled_;
  std::vector<std::unique_ptr<Request>> idle_; // as many as calls ran at once
};

// States owned by a bound function, initially zero.
class OwnState {
 public:
  explicit OwnState(const std::vector<StatePorts>& states) {
    for (const StatePorts& state : states) {
      const size_t bytes = count_of(state.input.sizes) * size_of(state.input.type);
      const size_t sides = state.has_rows ? 1 : 2;
      for (size_t side = 0; side < 2; ++side) {
        if (side < sides) {
          content_.push_back(std::make_unique<Line[]>(bytes / sizeof(Line) + 1));
        }
        memory_[side].push_back(content_.back().get());
      }
      has_rows_.push_back(state.has_rows ? 1 : 0);
    }
    view_ = {0, has_rows_.data(), {memory_[0].data(), memory_[1].data()}};
  }
  OwnState(const OwnState&) = delete;
  OwnState& operator=(const OwnState&) = delete;

  NativeState* view() {
    return &view_;
  }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  std::vector<std::unique_ptr<Line[]>> content_;
  std::vector<void*> memory_[2];
  std::vector<int64_t> has_rows_;
  NativeState view_{};
};

// --- Functions ----------------------------------------------------------------------------------

// One core for each configuration, for the life of the process: an import has no configuration.
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

class Function {
 public:
  Function(
      Words& words,
      const char* device,
      const char* const* config,
      uint64_t pairs)
      : device_(device), core_(core_of(device, config, pairs)) {
    limits_.resize(words.count());
    for (InputLimits& limits : limits_) {
      limits.any_rank = words.next() != 0;
      limits.axes.resize(words.count());
      for (Limit& axis : limits.axes) {
        axis.low = words.next();
        axis.high = words.next();
        axis.same_input = words.next();
        axis.same_axis = words.next();
        if (axis.same_input >= static_cast<int64_t>(limits_.size()) ||
            (axis.same_input != kOpen && (axis.same_input < 0 || axis.same_axis < 0))) {
          throw std::runtime_error("the size of an input that there is not");
        }
      }
    }
  }

  bool add(Words& words, const char* content, size_t size) {
    auto model = std::make_shared<Model>(words);
    if (core_ == nullptr || !model->import(core_, device_.c_str(), content, size)) {
      return false;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!models_.empty() && !models_.front()->has_states_of(*model)) {
      throw std::runtime_error("models that keep other states");
    }
    models_.push_back(std::move(model));
    return true;
  }

  // Returns the states of the first model; null for a model without states.
  std::unique_ptr<OwnState> make_state() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (models_.empty() || models_.front()->states().empty()) {
      return nullptr;
    }
    return std::make_unique<OwnState>(models_.front()->states());
  }

  int32_t run(const NativeArgument* arguments, uint64_t count, const Caller& caller) {
    if (count < limits_.size() || !is_within_limits(arguments)) {
      return kNotHere;
    }
    const std::shared_ptr<Model> model = find(arguments, count);
    return model == nullptr ? static_cast<int32_t>(kNotHere)
                            : model->run(arguments, count, caller);
  }

 private:
  bool is_within_limits(const NativeArgument* arguments) const {
    for (size_t n = 0; n < limits_.size(); ++n) {
      const InputLimits& limits = limits_[n];
      if (limits.any_rank) {
        continue;
      }
      const NativeArgument& argument = arguments[n];
      const bool is_scalar = argument.rank == 0 && limits.axes.size() == 1;
      if (!is_scalar && static_cast<size_t>(argument.rank) != limits.axes.size()) {
        return false;
      }
      for (size_t axis = 0; axis < limits.axes.size(); ++axis) {
        const Limit& limit = limits.axes[axis];
        const int64_t size = is_scalar ? 1 : argument.sizes[axis];
        if (size < limit.low || (limit.high != kOpen && size > limit.high)) {
          return false;
        }
        if (limit.same_input == kOpen) {
          continue;
        }
        const NativeArgument& other = arguments[limit.same_input];
        if (limit.same_axis >= other.rank || other.sizes[limit.same_axis] != size) {
          return false;
        }
      }
    }
    return true;
  }

  std::shared_ptr<Model> find(const NativeArgument* arguments, uint64_t count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const std::shared_ptr<Model>& model : models_) {
      if (model->fits(arguments, count)) {
        return model;
      }
    }
    return nullptr;
  }

  const std::string device_;
  const ov_core_t* const core_;
  std::vector<InputLimits> limits_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<Model>> models_;
};

// A function with the states of one caller, or without states.
struct Bound {
  std::shared_ptr<Function> function;
  std::unique_ptr<OwnState> own;
  NativeState* state;
};

} // namespace

// --- The interface; the header describes it -------------------------------------------------------

#define NATIVE_EXPORT extern "C" __attribute__((visibility("default")))

NATIVE_EXPORT int32_t coreml_native_version() {
  return kNativeVersion;
}

NATIVE_EXPORT int32_t coreml_native_machine(const char* device, char* text, uint64_t size) {
  try {
    const ov_core_t* const core = core_of(device, nullptr, 0);
    ov_version_t version{};
    if (core == nullptr || ov_get_openvino_version(&version) != OK) {
      return 0;
    }
    std::string found = version.buildNumber;
    ov_version_free(&version);
    for (const char* const name : {"FULL_DEVICE_NAME", "OPTIMIZATION_CAPABILITIES"}) {
      char* value = nullptr;
      if (ov_core_get_property(core, device, name, &value) != OK) {
        return 0;
      }
      found += '\n';
      found += value;
      ov_free(value);
    }
    if (found.size() >= size) {
      return 0;
    }
    std::memcpy(text, found.c_str(), found.size() + 1);
    return 1;
  } catch (...) {
    return 0;
  }
}

NATIVE_EXPORT void* coreml_native_create(
    const int64_t* words,
    uint64_t count,
    const char* device,
    const char* const* config,
    uint64_t pairs,
    char* error,
    uint64_t error_size) {
  try {
    Words description(words, count);
    return new std::shared_ptr<Function>(
        std::make_shared<Function>(description, device, config, pairs));
  } catch (const std::exception& failure) {
    std::snprintf(error, error_size, "%s", failure.what());
  }
  return nullptr;
}

NATIVE_EXPORT int32_t coreml_native_add(
    void* function,
    const int64_t* words,
    uint64_t count,
    const char* content,
    uint64_t size,
    char* error,
    uint64_t error_size) {
  try {
    Words description(words, count);
    if ((*static_cast<std::shared_ptr<Function>*>(function))->add(description, content, size)) {
      return 1;
    }
    const char* const message = ov_get_last_err_msg();
    std::snprintf(error, error_size, "%s", message == nullptr ? "" : message);
    ov_free(message);
  } catch (const std::exception& failure) {
    std::snprintf(error, error_size, "%s", failure.what());
  }
  return 0;
}

NATIVE_EXPORT void coreml_native_free(void* function) {
  delete static_cast<std::shared_ptr<Function>*>(function);
}

NATIVE_EXPORT void* coreml_native_bind(void* function, NativeState* state) {
  try {
    const auto& shared = *static_cast<std::shared_ptr<Function>*>(function);
    std::unique_ptr<OwnState> own = state == nullptr ? shared->make_state() : nullptr;
    NativeState* const bound = own == nullptr ? state : own->view();
    return new Bound{shared, std::move(own), bound};
  } catch (...) {
    return nullptr;
  }
}

NATIVE_EXPORT void coreml_native_unbind(void* model) {
  delete static_cast<Bound*>(model);
}

NATIVE_EXPORT int32_t coreml_native_run(
    void* model,
    const NativeArgument* arguments,
    uint64_t count,
    NativeResize resize,
    void* context) {
  try {
    const Bound& bound = *static_cast<Bound*>(model);
    return bound.function->run(arguments, count, {resize, context, bound.state});
  } catch (...) {
    return kFailed;
  }
}
