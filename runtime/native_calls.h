// How functions of native_calls.cpp are called, from Python and from C++.

#pragma once

#include <cstdint>

// Of this interface, and of the descriptions of functions and models. To be raised with any of them.
constexpr int32_t kNativeVersion = 3;

// A contiguous tensor of a call.
struct NativeArgument {
  void* data;
  const int32_t* sizes;
  int32_t rank;
  int32_t type; // c10::ScalarType
};

// Gives argument `n` of a call, an output, other sizes. Returns its memory, which may be another
// than before, or null if it cannot have them.
using NativeResize =
    void* (*)(void* context, uint64_t n, const int64_t* sizes, uint64_t rank);

// The states of one caller. A state that calls replace has memory on both sides: a call reads
// `side` and writes the other one, which is then `side`. A state that calls write rows of has the
// same memory on both.
struct NativeState {
  int64_t side;
  const int64_t* has_rows; // for each state, whether calls write rows of it
  void** memory[2];
};

enum NativeResult : int32_t {
  kDone = 0,
  kNotHere = 1, // another type, shape or number of tensors, or a value out of range
  kFailed = 2, // OpenVINO failed, or a row that does not exist is to be written
};

// Runs once: `arguments` are the inputs, then the outputs; `resize` may be null. May be called by
// several threads at once if the model has no states. If the result is not kDone, no state has
// changed.
using NativeRun = int32_t (*)(
    void* model,
    const NativeArgument* arguments,
    uint64_t count,
    NativeResize resize,
    void* context);

extern "C" {

int32_t coreml_native_version();

// Writes what compiled models depend on besides the program: OpenVINO's version, and the CPU with
// what it is capable of. Returns 1, or 0 if OpenVINO fails or the text takes more bytes.
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

// Adds a model, for the input shapes that it takes. Returns 1, or 0 with a message in `error`. The
// content has to stay as long as the function does: constants are read from it.
int32_t coreml_native_add(
    void* function,
    const int64_t* words,
    uint64_t count,
    const char* content,
    uint64_t size,
    char* error,
    uint64_t error_size);

// What has been bound keeps the function.
void coreml_native_free(void* function);

// Returns what coreml_native_run takes as a model, or null for want of memory. States stay the
// caller's; where there are none, a function that has states gets some of its own, all zeros.
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
