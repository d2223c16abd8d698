// A backend of ExecuTorch for applications without Python.
//
// It runs the delegates that `coreml-delegate compile` has compiled on this machine, from the files
// that the command writes to the cache. It registers itself when linked into the application.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <fcntl.h>
#include <pwd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/core/error.h>
#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/platform/log.h>

#include "delegate_calls.h"
#include "native_calls.h"

namespace {

namespace et = executorch::runtime;

// --- Names of files; native_files.py writes the files. --------------------------------------------

// BLAKE2b with a digest of 32 bytes, as RFC 7693 describes it.
class Digest {
 public:
  Digest() {
    std::copy(kInitial.begin(), kInitial.end(), state_.begin());
    state_[0] ^= 0x01010000 ^ kBytes;
  }

  void update(const void* data, size_t size) {
    const auto* from = static_cast<const uint8_t*>(data);
    while (size > 0) {
      if (filled_ == block_.size()) { // the last block is compressed by finish
        compress(false);
      }
      const size_t taken = std::min(size, block_.size() - filled_);
      std::memcpy(block_.data() + filled_, from, taken);
      filled_ += taken;
      from += taken;
      size -= taken;
    }
  }

  void update(const std::string& text) {
    update(text.data(), text.size());
  }

  std::string finish() {
    std::fill(block_.begin() + filled_, block_.end(), 0);
    compress(true);
    std::string digest(kBytes, '\0');
    std::memcpy(digest.data(), state_.data(), kBytes);
    return digest;
  }

 private:
  static constexpr size_t kBytes = 32;
  static constexpr std::array<uint64_t, 8> kInitial = {
      0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
      0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
  static constexpr uint8_t kOrder[10][16] = {
      {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
      {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
      {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
      {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
      {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
      {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
      {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
      {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
      {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
      {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

  static uint64_t rotate(uint64_t value, int bits) {
    return value >> bits | value << (64 - bits);
  }

  void compress(bool is_last) {
    counted_ += filled_;
    filled_ = 0;
    std::array<uint64_t, 16> words;
    std::memcpy(words.data(), block_.data(), block_.size()); // both are little-endian
    std::array<uint64_t, 16> work;
    std::copy(state_.begin(), state_.end(), work.begin());
    std::copy(kInitial.begin(), kInitial.end(), work.begin() + 8);
    work[12] ^= counted_;
    work[14] ^= is_last ? ~uint64_t{0} : 0;
    for (int round = 0; round < 12; ++round) {
      const uint8_t* const order = kOrder[round % 10];
      for (int n = 0; n < 8; ++n) {
        // Four columns, then four diagonals.
        const int shift = n < 4 ? 0 : 1;
        uint64_t& a = work[n % 4];
        uint64_t& b = work[4 + (n + shift) % 4];
        uint64_t& c = work[8 + (n + 2 * shift) % 4];
        uint64_t& d = work[12 + (n + 3 * shift) % 4];
        a += b + words[order[2 * n]];
        d = rotate(d ^ a, 32);
        c += d;
        b = rotate(b ^ c, 24);
        a += b + words[order[2 * n + 1]];
        d = rotate(d ^ a, 16);
        c += d;
        b = rotate(b ^ c, 63);
      }
    }
    for (size_t n = 0; n < state_.size(); ++n) {
      state_[n] ^= work[n] ^ work[n + 8];
    }
  }

  std::array<uint64_t, 8> state_;
  std::array<uint8_t, 128> block_{};
  size_t filled_ = 0;
  uint64_t counted_ = 0;
};

constexpr char kDevice[] = "CPU";

// The properties of the machine that compiled models depend on.
const std::string& machine() {
  static const std::string text = [] {
    std::array<char, 4096> found{};
    if (coreml_native_machine(kDevice, found.data(), found.size()) != 1) {
      throw std::runtime_error("OpenVINO's CPU plugin does not start");
    }
    return std::string(found.data());
  }();
  return text;
}

std::string key_of(const char* method, const void* processed, size_t size) {
  Digest digest;
  const std::string schema = "coreml-delegate native " + std::to_string(kNativeVersion);
  for (const std::string& text : {schema, machine(), std::string(method)}) {
    digest.update(text);
    digest.update("\0", 1);
  }
  digest.update(processed, size);
  return digest.finish();
}

std::string cache_folder() {
  if (const char* const named = std::getenv("COREML_DELEGATE_CACHE"); named && *named) {
    return named;
  }
  if (const char* const caches = std::getenv("XDG_CACHE_HOME"); caches && *caches == '/') {
    return std::string(caches) + "/coreml-delegate";
  }
  const char* home = std::getenv("HOME");
  if (home == nullptr) {
    const passwd* const user = getpwuid(getuid());
    home = user == nullptr ? "" : user->pw_dir;
  }
  return std::string(home) + "/.cache/coreml-delegate";
}

std::string path_of(const std::string& key) {
  static constexpr char digits[] = "0123456789abcdef";
  std::string name;
  for (const char byte : key) {
    name += digits[static_cast<uint8_t>(byte) >> 4];
    name += digits[static_cast<uint8_t>(byte) & 15];
  }
  return cache_folder() + "/native/" + name + ".entry";
}

// --- Files; entry_cache.py describes entries, native_files.py their content. ----------------------

// CRC-32 as in zlib, computed eight bytes at a time.
uint32_t checksum_of(const char* data, size_t size) {
  static const auto tables = [] {
    std::array<std::array<uint32_t, 256>, 8> made{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t value = byte;
      for (int bit = 0; bit < 8; ++bit) {
        value = value >> 1 ^ (value & 1 ? 0xEDB88320 : 0);
      }
      made[0][byte] = value;
    }
    for (size_t n = 1; n < made.size(); ++n) {
      for (size_t byte = 0; byte < 256; ++byte) {
        const uint32_t before = made[n - 1][byte];
        made[n][byte] = before >> 8 ^ made[0][before & 255];
      }
    }
    return made;
  }();
  uint32_t value = ~uint32_t{0};
  const auto* at = reinterpret_cast<const uint8_t*>(data);
  for (; size >= 8; size -= 8, at += 8) {
    uint64_t next = 0;
    std::memcpy(&next, at, sizeof next); // little-endian
    next ^= value;
    value = 0;
    for (int n = 0; n < 8; ++n) {
      value ^= tables[7 - n][next >> (8 * n) & 255];
    }
  }
  for (; size > 0; --size, ++at) {
    value = value >> 8 ^ tables[0][(value ^ *at) & 255];
  }
  return ~value;
}

// A privately mapped file, because OpenVINO may write to the constants of a model.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) {
      return;
    }
    struct stat status{};
    if (fstat(file, &status) == 0 && status.st_size > 0) {
      const auto bytes = static_cast<size_t>(status.st_size);
      void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
      if (data != MAP_FAILED) {
        data_ = static_cast<char*>(data);
        size_ = bytes;
      }
    }
    close(file);
  }
  ~MappedFile() {
    if (data_ != nullptr) {
      munmap(data_, size_);
    }
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const char* data() const {
    return data_;
  }
  size_t size() const {
    return size_;
  }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

// A part of a file, read from its start.
class Reader {
 public:
  Reader(const char* data, size_t size) : data_(data), size_(size) {}

  const char* take(uint64_t bytes) {
    if (bytes > size_ - at_) {
      throw std::runtime_error("it is cut off");
    }
    const char* const taken = data_ + at_;
    at_ += bytes;
    return taken;
  }

  uint64_t number() {
    uint64_t value = 0;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }

  const int64_t* words(uint64_t count) {
    if (count > size_ / sizeof(int64_t)) {
      throw std::runtime_error("it is cut off");
    }
    return reinterpret_cast<const int64_t*>(take(count * sizeof(int64_t)));
  }

  const char* part(uint64_t offset, uint64_t bytes) const {
    if (offset > size_ || bytes > size_ - offset) {
      throw std::runtime_error("it is cut off");
    }
    return data_ + offset;
  }

 private:
  const char* data_;
  size_t size_;
  uint64_t at_ = 0;
};

constexpr size_t kHeader = 4096;

// Returns the payload of an entry.
Reader payload_of(const MappedFile& file, const std::string& key) {
  if (file.size() < kHeader) {
    throw std::runtime_error("it is no entry of the cache");
  }
  Reader header(file.data(), kHeader);
  const std::string magic(header.take(8), 8);
  const uint64_t version = header.number(); // and the checksum above it
  const uint64_t size = header.number();
  const uint64_t described = header.number();
  if (magic != "CMDENTRY" || (version & 0xFFFFFFFF) != 1) {
    throw std::runtime_error("it is no entry of this version");
  }
  if (size != file.size() || described > size - kHeader) {
    throw std::runtime_error("it is cut off");
  }
  if (checksum_of(file.data() + 16, file.size() - 16) != version >> 32) {
    throw std::runtime_error("its checksum is wrong");
  }
  if (std::string(header.take(32), 32) != key) {
    throw std::runtime_error("it belongs to another program");
  }
  return {file.data() + kHeader, size - kHeader - described};
}

// --- Delegates ------------------------------------------------------------------------------------

struct FreeFunction {
  void operator()(void* function) const {
    coreml_native_free(function);
  }
};
struct Unbind {
  void operator()(void* model) const {
    coreml_native_unbind(model);
  }
};

// A delegate with its own states.
class Delegate {
 public:
  Delegate(const std::string& path, const std::string& key, const char* method)
      : method_(method), file_(path) {
    if (file_.data() == nullptr) {
      throw std::runtime_error(
          "it is not compiled; run `coreml-delegate compile` on this machine, with this version "
          "of OpenVINO, which writes");
    }
    Reader reader = payload_of(file_, key);
    const uint64_t text = reader.number();
    const uint64_t pairs = reader.number();
    const uint64_t words = reader.number();
    const uint64_t models = reader.number();
    if (pairs > text) {
      throw std::runtime_error("its texts are damaged");
    }
    const std::vector<const char*> texts = strings(reader.take(text), text, 1 + 2 * pairs);
    std::array<char, 1024> error{};
    const int64_t* const described = reader.words(words);
    function_.reset(coreml_native_create(
        described, words, texts[0], texts.data() + 1, pairs, error.data(), error.size()));
    if (function_ == nullptr) {
      throw std::runtime_error(error.data());
    }
    for (uint64_t n = 0; n < models; ++n) {
      const uint64_t count = reader.number();
      const uint64_t offset = reader.number();
      const uint64_t bytes = reader.number();
      const int64_t* const ports = reader.words(count);
      if (coreml_native_add(
              function_.get(),
              ports,
              count,
              reader.part(offset, bytes),
              bytes,
              error.data(),
              error.size()) != 1) {
        throw std::runtime_error(error.data());
      }
    }
    bound_.reset(coreml_native_bind(function_.get(), nullptr));
    if (bound_ == nullptr) {
      throw std::bad_alloc();
    }
  }

  et::Error run(et::Span<et::EValue*> values) {
    switch (call_natively(coreml_native_run, bound_.get(), values)) {
      case kDone:
        return et::Error::Ok;
      case kNotHere:
        ET_LOG(
            Error,
            "Core ML delegate of method %s: a tensor has a dtype, a shape or a dimension order "
            "that it does not take, or integers beyond 32 bits",
            method_.c_str());
        return et::Error::InvalidArgument;
      default:
        ET_LOG(
            Error,
            "Core ML delegate of method %s: OpenVINO failed, or a row that does not exist was to "
            "be written to a state",
            method_.c_str());
        return et::Error::Internal;
    }
  }

 private:
  // Returns the first `count` zero-terminated texts.
  static std::vector<const char*> strings(const char* text, uint64_t bytes, uint64_t count) {
    if (bytes == 0 || text[bytes - 1] != '\0' || count > bytes) {
      throw std::runtime_error("its texts are damaged");
    }
    std::vector<const char*> found;
    for (const char* at = text; found.size() < count; at += std::strlen(at) + 1) {
      if (at >= text + bytes) {
        throw std::runtime_error("its texts are damaged");
      }
      found.push_back(at);
    }
    return found;
  }

  const std::string method_;
  const MappedFile file_; // constants lie in it
  std::unique_ptr<void, FreeFunction> function_;
  std::unique_ptr<void, Unbind> bound_;
};

class NativeBackend final : public et::BackendInterface {
 public:
  bool is_available() const override {
    return true;
  }

  et::Result<et::DelegateHandle*> init(
      et::BackendInitContext& context,
      et::FreeableBuffer* processed,
      executorch::aten::ArrayRef<et::CompileSpec> /*specs*/) const override {
    const char* const named = context.get_method_name();
    const char* const method = named == nullptr ? "" : named;
    std::string path;
    try {
      const auto data = processed->data_safe();
      if (!data.ok()) {
        return data.error();
      }
      const std::string key = key_of(method, data.get(), processed->size());
      path = path_of(key);
      auto delegate = std::make_unique<Delegate>(path, key, method);
      processed->Free(); // the compiled models are all that calls need
      return static_cast<et::DelegateHandle*>(delegate.release());
    } catch (const std::bad_alloc&) {
      return et::Error::MemoryAllocationFailed;
    } catch (const std::exception& error) {
      // The reason comes first, because the runtime truncates long messages.
      ET_LOG(
          Error, "Core ML delegate of method %s: %s: %s", method, error.what(), path.c_str());
      return et::Error::NotFound;
    }
  }

  et::Error execute(
      et::BackendExecutionContext& /*context*/,
      et::DelegateHandle* handle,
      et::Span<et::EValue*> values) const override {
    return static_cast<Delegate*>(handle)->run(values);
  }

  void destroy(et::DelegateHandle* handle) const override {
    delete static_cast<Delegate*>(handle);
  }
};

NativeBackend backend;
const et::Error registered = et::register_backend({"CoreMLBackend", &backend});

} // namespace
