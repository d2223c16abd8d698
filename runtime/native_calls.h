// The interface of native_calls.cpp for Python and C++.

#pragma once

#include <cstdint>

// Version of this interface and of the descriptions of functions and models. Increment it with any
// change of these.
constexpr int32_t kNativeVersion = 3;

// A contiguous tensor of a call.
struct NativeArgument {
  void* data;
  const int32_t* sizes;
  int32_t rank;
  int32_t type; // c10::ScalarType
};

// Resizes argument `n` of a call, an output. Returns its memory, whose address may have changed, or
// null if these sizes are impossible.
using NativeResize =
    void* (*)(void* context, uint64_t n, const int64_t* sizes, uint64_t rank);

// The states of one caller. A state that calls replace has memory on both sides: a call reads side
// `side` and writes the other side, which then becomes `side`. A state that calls write rows to has
// the same memory on both sides.
struct NativeState {
  int64_t side;
  const int64_t* has_rows; // for each state, whether calls write rows to it
  void** memory[2];
};

enum NativeResult : int32_t {
  kDone = 0,
  kNotHere = 1, // another type, shape or number of tensors, or a value out of range
  kFailed = 2, // OpenVINO failed, or the index of a row to write is out of range
};

// Runs once. `arguments` are the inputs, then the outputs; `resize` may be null. Several threads
// may call it at the same time if the model has no states. Unless the result is kDone, no state
// has changed.
using NativeRun = int32_t (*)(
    void* model,
    const NativeArgument* arguments,
    uint64_t count,
    NativeResize resize,
    void* context);

extern "C" {

int32_t coreml_native_version();

// Writes the properties of the machine that compiled models depend on: OpenVINO's version, and the
// CPU with its capabilities. Returns 1, or 0 if OpenVINO fails or the text is longer than `size`.
int32_t coreml_native_machine(const char* device, char* text, uint64_t size);

// Returns a function without models, or null with a message in `error`. The words describe its
// inputs, `config` are the names and values of OpenVINO's properties, one after another.
void* coreml_native_create(
    const int64_t* words,
    uint64_t count,
    const char* device,
    const char* const* config,
    uint64_t pairs,
    char* error,
    uint64_t error_size);

// Adds a model, for its input shapes. Returns 1, or 0 with a message in `error`. The content must
// live as long as the function, because constants are read from it.
int32_t coreml_native_add(
    void* function,
    const int64_t* words,
    uint64_t count,
    const char* content,
    uint64_t size,
    char* error,
    uint64_t error_size);

// Bound models keep the function alive.
void coreml_native_free(void* function);

// Returns a model for coreml_native_run, or null if memory is insufficient. The caller owns
// `state`; if it is null, a function with states gets its own, initially zero.
void* coreml_native_bind(void* function, NativeState* state);

void coreml_native_unbind(void* model);

// See NativeRun.
int32_t coreml_native_run(
    void* model,
    const NativeArgument* arguments,
    uint64_t count,
    NativeResize resize,
    void* context);

} // extern "C"
