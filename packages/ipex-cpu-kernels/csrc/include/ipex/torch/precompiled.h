// SPDX-License-Identifier: Apache-2.0
// Models that ipex.precompile has written, in C++ programs without Python:
//
//   ipex::Precompiled model("resnet.safetensors");
//   std::vector<c10::IValue> results = model({images});
//
// Needs libtorch, and libipex_cpp.so for the ops (CMake: find_package(IPEX)). C++17.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <ipex/kernel_api.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <initializer_list>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace ipex {
namespace precompiled_detail {

// JSON
// --------------------------------------------------------------------------------------------------------------

struct Json {
  enum class Kind { Null, Bool, Integer, Real, Text, List, Object };
  Kind kind = Kind::Null;
  std::int64_t integer = 0;  // also of Bool
  double real = 0;           // also of Integer
  std::string text;
  std::vector<Json> items;                            // of a list
  std::vector<std::pair<std::string, Json>> members;  // of an object

  const Json* find(const std::string& name) const {
    for (const auto& member : members)
      if (member.first == name) return &member.second;
    return nullptr;
  }
  const Json& at(const std::string& name) const {
    const Json* found = find(name);
    TORCH_CHECK_VALUE(found != nullptr, "an object must have ", name, ", which is missing");
    return *found;
  }
  const std::string& string() const {
    TORCH_CHECK_VALUE(kind == Kind::Text, "a value must be a text");
    return text;
  }
  std::int64_t number() const {
    TORCH_CHECK_VALUE(kind == Kind::Integer, "a value must be an integer");
    return integer;
  }
  bool is_null() const { return kind == Kind::Null; }
};

class JsonReader {
 public:
  explicit JsonReader(const std::string& text) : at_(text.data()), end_(at_ + text.size()) {}

  Json read() {
    Json value = one(0);
    space();
    check(at_ == end_);
    return value;
  }

 private:
  static constexpr int kDeepest = 200;

  static void check(bool right) { TORCH_CHECK_VALUE(right, "the JSON must be complete and valid"); }
  void space() {
    while (at_ != end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r')) ++at_;
  }
  bool take(char c) {
    space();
    if (at_ == end_ || *at_ != c) return false;
    ++at_;
    return true;
  }
  void word(const char* text) {
    for (; *text != '\0'; ++text, ++at_) check(at_ != end_ && *at_ == *text);
  }
  Json one(int depth) {
    check(depth < kDeepest);
    space();
    check(at_ != end_);
    Json value;
    switch (*at_) {
      case '{':
        ++at_;
        value.kind = Json::Kind::Object;
        if (take('}')) return value;
        do {
          space();
          std::string name = text();
          check(take(':'));
          value.members.emplace_back(std::move(name), one(depth + 1));
        } while (take(','));
        check(take('}'));
        return value;
      case '[':
        ++at_;
        value.kind = Json::Kind::List;
        if (take(']')) return value;
        do value.items.push_back(one(depth + 1));
        while (take(','));
        check(take(']'));
        return value;
      case '"':
        value.kind = Json::Kind::Text;
        value.text = text();
        return value;
      case 't':
      case 'f':
        value.kind = Json::Kind::Bool;
        value.integer = *at_ == 't';
        word(value.integer != 0 ? "true" : "false");
        return value;
      case 'n':
        word("null");
        return value;
      default:
        return numeric();
    }
  }
  Json numeric() {
    const char* begin = at_;
    bool real = false;
    while (at_ != end_ && (std::strchr("+-.eE", *at_) != nullptr || (*at_ >= '0' && *at_ <= '9'))) {
      real |= *at_ == '.' || *at_ == 'e' || *at_ == 'E';
      ++at_;
    }
    const std::string digits(begin, at_);
    check(!digits.empty());
    Json value;
    try {
      value.kind = real ? Json::Kind::Real : Json::Kind::Integer;
      if (!real) value.integer = std::stoll(digits);
      value.real = std::stod(digits);
    } catch (const std::exception&) {
      check(false);
    }
    return value;
  }
  unsigned code() {
    check(end_ - at_ >= 4);
    unsigned found = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      const char* digits = "0123456789abcdef";
      const char* digit = std::strchr(digits, *at_ | 0x20);
      check(*at_ != '\0' && digit != nullptr);
      found = found * 16 + static_cast<unsigned>(digit - digits);
    }
    return found;
  }
  std::string text() {
    check(at_ != end_ && *at_ == '"');
    ++at_;
    std::string found;
    for (; check(at_ != end_), *at_ != '"';) {
      if (*at_ != '\\') {
        found += *at_++;
        continue;
      }
      check(end_ - at_ >= 2);
      const char escaped = at_[1];
      at_ += 2;
      if (escaped != 'u') {
        static const std::string from = "\"\\/bfnrt", to = "\"\\/\b\f\n\r\t";
        const std::size_t place = from.find(escaped);
        check(place != std::string::npos);
        found += to[place];
        continue;
      }
      unsigned point = code();
      if (point >= 0xd800 && point < 0xdc00) {  // the first half of a pair
        check(end_ - at_ >= 2 && at_[0] == '\\' && at_[1] == 'u');
        at_ += 2;
        point = 0x10000 + ((point - 0xd800) << 10) + (code() - 0xdc00);
      }
      append(found, point);
    }
    ++at_;
    return found;
  }
  static void append(std::string& text, unsigned point) {
    const auto byte = [&](unsigned value) { text += static_cast<char>(value); };
    if (point < 0x80) return byte(point);
    if (point < 0x800) {
      byte(0xc0 | (point >> 6));
    } else if (point < 0x10000) {
      byte(0xe0 | (point >> 12));
      byte(0x80 | ((point >> 6) & 0x3f));
    } else {
      byte(0xf0 | (point >> 18));
      byte(0x80 | ((point >> 12) & 0x3f));
      byte(0x80 | ((point >> 6) & 0x3f));
    }
    byte(0x80 | (point & 0x3f));
  }

  const char* at_;
  const char* end_;
};

// SHA-256 (FIPS 180-4)
// --------------------------------------------------------------------------------------------------------------

class Sha256 {
 public:
  void update(const void* data, std::size_t size) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    total_ += size;
    while (size > 0) {
      const std::size_t part = std::min(size, block_.size() - filled_);
      std::memcpy(block_.data() + filled_, bytes, part);
      filled_ += part;
      bytes += part;
      size -= part;
      if (filled_ == block_.size()) {
        mix();
        filled_ = 0;
      }
    }
  }
  void update(const std::string& text) { update(text.data(), text.size()); }
  std::string hex() {
    const std::uint64_t bits = total_ * 8;
    const unsigned char one = 0x80, zero = 0;
    update(&one, 1);
    while (filled_ != 56) update(&zero, 1);
    unsigned char length[8];
    for (int i = 0; i < 8; ++i) length[i] = static_cast<unsigned char>(bits >> (56 - 8 * i));
    update(length, 8);
    std::string text;
    for (const std::uint32_t word : state_)
      for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[(word >> shift) & 15];
    return text;
  }

 private:
  // The fractional parts of the cube roots of the first 64 primes.
  static const std::array<std::uint32_t, 64>& constants() {
    static const std::array<std::uint32_t, 64> found = [] {
      std::array<std::uint32_t, 64> values{};
      std::size_t count = 0;
      for (int n = 2; count < values.size(); ++n) {
        bool prime = true;
        for (int d = 2; d * d <= n; ++d) prime = prime && n % d != 0;
        if (!prime) continue;
        const long double root = std::cbrt(static_cast<long double>(n));
        values[count++] = static_cast<std::uint32_t>((root - std::floor(root)) * 4294967296.0L);
      }
      return values;
    }();
    return found;
  }
  static std::uint32_t turn(std::uint32_t x, int by) { return (x >> by) | (x << (32 - by)); }
  void mix() {
    std::uint32_t w[64];
    for (int i = 0; i < 16; ++i) {
      w[i] = 0;
      for (int j = 0; j < 4; ++j) w[i] = (w[i] << 8) | block_[static_cast<std::size_t>(4 * i + j)];
    }
    for (int i = 16; i < 64; ++i) {
      const std::uint32_t a = turn(w[i - 15], 7) ^ turn(w[i - 15], 18) ^ (w[i - 15] >> 3);
      const std::uint32_t b = turn(w[i - 2], 17) ^ turn(w[i - 2], 19) ^ (w[i - 2] >> 10);
      w[i] = w[i - 16] + a + w[i - 7] + b;
    }
    std::array<std::uint32_t, 8> s = state_;
    for (std::size_t i = 0; i < 64; ++i) {
      const std::uint32_t e = turn(s[4], 6) ^ turn(s[4], 11) ^ turn(s[4], 25);
      const std::uint32_t first =
          s[7] + e + ((s[4] & s[5]) ^ (~s[4] & s[6])) + constants()[i] + w[i];
      const std::uint32_t a = turn(s[0], 2) ^ turn(s[0], 13) ^ turn(s[0], 22);
      const std::uint32_t second = a + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
      for (std::size_t j = 7; j > 0; --j) s[j] = s[j - 1];
      s[4] += first;
      s[0] = first + second;
    }
    for (std::size_t i = 0; i < 8; ++i) state_[i] += s[i];
  }

  std::array<std::uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<unsigned char, 64> block_{};
  std::size_t filled_ = 0;
  std::uint64_t total_ = 0;
};

// Values
// --------------------------------------------------------------------------------------------------------------

struct Dtype {
  const char* file;  // in safetensors
  const char* name;  // in torch
  at::ScalarType type;
};
inline const std::vector<Dtype>& dtypes() {
  static const std::vector<Dtype> known = {
      {"F32", "float32", at::kFloat},
      {"BF16", "bfloat16", at::kBFloat16},
      {"F16", "float16", at::kHalf},
      {"F64", "float64", at::kDouble},
      {"I8", "int8", at::kChar},
      {"U8", "uint8", at::kByte},
      {"I16", "int16", at::kShort},
      {"I32", "int32", at::kInt},
      {"I64", "int64", at::kLong},
      {"BOOL", "bool", at::kBool},
      {"F8_E4M3", "float8_e4m3fn", at::kFloat8_e4m3fn},
      {"F8_E5M2", "float8_e5m2", at::kFloat8_e5m2},
  };
  return known;
}
inline const Dtype& dtype_of(const std::string& name, bool of_file) {
  for (const Dtype& one : dtypes())
    if (name == (of_file ? one.file : one.name)) return one;
  TORCH_CHECK_VALUE(false, "a dtype must be one that C++ programs read, got ", name);
}

inline std::vector<std::int64_t> integers(const Json& list) {
  std::vector<std::int64_t> found;
  for (const Json& one : list.items) found.push_back(one.number());
  return found;
}

using Symbols = std::map<std::string, double>;

// The value of an expression on sizes: numbers, {"size": name} and [function, number of arguments],
// each behind its arguments.
inline double evaluate(const Json& steps, const Symbols& symbols) {
  std::vector<double> stack;
  for (const Json& step : steps.items) {
    if (step.kind == Json::Kind::Integer || step.kind == Json::Kind::Real) {
      stack.push_back(step.real);
      continue;
    }
    if (step.kind == Json::Kind::Object) {
      const auto found = symbols.find(step.at("size").string());
      TORCH_CHECK_VALUE(found != symbols.end(), "a size must be one of an input");
      stack.push_back(found->second);
      continue;
    }
    TORCH_CHECK_VALUE(step.items.size() == 2, "an expression must have functions and numbers");
    const std::string& name = step.items[0].string();
    const auto count = static_cast<std::size_t>(step.items[1].number());
    TORCH_CHECK_VALUE(count >= 1 && count <= stack.size(), "an expression must be complete");
    const std::vector<double> x(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end());
    stack.resize(stack.size() - count);
    const double a = x[0], b = count > 1 ? x[1] : 0;
    const auto floor_mod = [](double p, double q) { return p - std::floor(p / q) * q; };
    const auto is = [&](std::initializer_list<const char*> names) {
      return std::any_of(names.begin(), names.end(), [&](const char* one) { return name == one; });
    };
    double value = 0;
    if (is({"Add"}))
      value = a + b;
    else if (is({"Sub"}))
      value = a - b;
    else if (is({"Mult"}))
      value = a * b;
    else if (is({"Div", "IntTrueDiv", "FloatTrueDiv"}))
      value = a / b;
    else if (is({"FloorDiv", "CleanDiv"}))
      value = std::floor(a / b);
    else if (is({"CeilDiv"}))
      value = std::ceil(a / b);
    else if (is({"Mod", "PythonMod"}))
      value = floor_mod(a, b);
    else if (is({"Pow", "PowByNatural"}))
      value = std::pow(a, b);
    else if (is({"USub"}))
      value = -a;
    else if (is({"UAdd", "ToFloat"}))
      value = a;
    else if (is({"Not", "Invert"}))
      value = a == 0;
    else if (is({"BitAnd", "And"}))
      value = std::all_of(x.begin(), x.end(), [](double v) { return v != 0; });
    else if (is({"BitOr", "Or"}))
      value = std::any_of(x.begin(), x.end(), [](double v) { return v != 0; });
    else if (is({"Eq"}))
      value = a == b;
    else if (is({"NotEq", "Ne"}))
      value = a != b;
    else if (is({"Lt"}))
      value = a < b;
    else if (is({"LtE"}))
      value = a <= b;
    else if (is({"Gt"}))
      value = a > b;
    else if (is({"GtE"}))
      value = a >= b;
    else if (is({"Abs"}))
      value = std::fabs(a);
    else if (is({"CeilToInt"}))
      value = std::ceil(a);
    else if (is({"FloorToInt"}))
      value = std::floor(a);
    else if (is({"TruncToInt"}))
      value = std::trunc(a);
    else if (is({"Max"}))
      value = *std::max_element(x.begin(), x.end());
    else if (is({"Min"}))
      value = *std::min_element(x.begin(), x.end());
    else if (is({"ModularIndexing"}) && count == 3)
      value = floor_mod(std::floor(a / b), x[2]);
    else
      TORCH_CHECK_VALUE(false, "a function of sizes must be a known one, got ", name);
    stack.push_back(value);
  }
  TORCH_CHECK_VALUE(stack.size() == 1, "an expression must have one value");
  return stack[0];
}

// What a run knows.
struct State {
  std::vector<c10::IValue> slots;
  std::vector<std::int64_t> numbers;

  const c10::IValue& slot(std::int64_t index) const {
    TORCH_CHECK_VALUE(index >= 0 && static_cast<std::size_t>(index) < slots.size(),
                      "a value must be in one of the slots, got ", index);
    return slots[static_cast<std::size_t>(index)];
  }
  std::int64_t size(std::int64_t index) const {
    TORCH_CHECK_VALUE(index >= 0 && static_cast<std::size_t>(index) < numbers.size(),
                      "a size must be one of the file, got ", index);
    return numbers[static_cast<std::size_t>(index)];
  }
};

// An argument as the parameter of an op wants it; without a type, what the JSON says.
inline c10::IValue value_of(const Json& json, const State& state, const c10::TypePtr& wanted) {
  c10::TypePtr type = wanted;
  if (json.is_null()) return {};
  if (type && type->kind() == c10::TypeKind::OptionalType)
    type = type->expectRef<c10::OptionalType>().getElementType();
  const auto kind = type ? type->kind() : c10::TypeKind::AnyType;
  switch (json.kind) {
    case Json::Kind::Bool:
      return json.integer != 0;
    case Json::Kind::Integer:
      if (kind == c10::TypeKind::FloatType) return json.real;
      if (kind == c10::TypeKind::NumberType) return at::Scalar(json.integer);
      return json.integer;
    case Json::Kind::Real:
      return json.real;
    case Json::Kind::Text:
      return json.text;
    case Json::Kind::Object:
      break;
    default: {
      const c10::TypePtr element = kind == c10::TypeKind::ListType
                                       ? type->expectRef<c10::ListType>().getElementType()
                                       : nullptr;
      TORCH_CHECK_VALUE(element, "a list must be given where the op takes one");
      c10::impl::GenericList list(element);
      for (const Json& one : json.items) list.push_back(value_of(one, state, element));
      return list;
    }
  }
  if (const Json* found = json.find("slot")) return state.slot(found->number());
  if (const Json* found = json.find("size")) return state.size(found->number());
  if (const Json* found = json.find("dtype"))
    return static_cast<std::int64_t>(dtype_of(found->string(), false).type);
  if (const Json* found = json.find("device")) return c10::Device(found->string());
  if (const Json* found = json.find("float")) {
    const std::string& text = found->string();
    const double infinite = std::numeric_limits<double>::infinity();
    return text == "inf" ? infinite : text == "-inf" ? -infinite : std::nan("");
  }
  if (const Json* found = json.find("layout"))
    return static_cast<std::int64_t>(found->string() == "strided" ? at::kStrided : at::kSparse);
  if (const Json* found = json.find("memory_format")) {
    const std::string& text = found->string();
    return static_cast<std::int64_t>(text == "channels_last"      ? at::MemoryFormat::ChannelsLast
                                     : text == "channels_last_3d" ? at::MemoryFormat::ChannelsLast3d
                                     : text == "preserve_format"  ? at::MemoryFormat::Preserve
                                                                  : at::MemoryFormat::Contiguous);
  }
  TORCH_CHECK_VALUE(false, "a value must be of a kind that plans have");
}

// A tensor in a layout that each op of torch takes; programs have more, as of 1-D convolutions.
inline c10::IValue laid_out(c10::IValue value) {
  if (!value.isTensor() || !value.toTensor().defined()) return value;
  const at::Tensor tensor = value.toTensor();
  const auto strides = tensor.strides();
  const bool last = (tensor.dim() == 4 && tensor.is_contiguous(at::MemoryFormat::ChannelsLast)) ||
                    (tensor.dim() == 5 && tensor.is_contiguous(at::MemoryFormat::ChannelsLast3d));
  if (last || std::find(strides.begin(), strides.end(), 0) != strides.end()) return value;
  return tensor.contiguous();
}

inline c10::OperatorHandle op(const std::string& name) {
  const std::size_t dot = name.find('.', name.find("::") + 2);
  std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  if (overload == "default") overload.clear();
  const auto found = c10::Dispatcher::singleton().findSchema({name.substr(0, dot), overload});
  TORCH_CHECK_VALUE(found.has_value(), "an op must be one that this program has, got ", name,
                    ": link libipex_cpp.so and libtorch, or write a model without this op");
  return *found;
}

// An op of torch that has no instruction. A file must not name one that does more than compute.
inline c10::OperatorHandle computing_op(const std::string& name) {
  const std::string space = name.substr(0, name.find("::"));
  const std::string base =
      name.substr(0, name.find('.')).substr(std::min(name.size(), space.size() + 2));
  const auto among = [](const std::string& text, std::initializer_list<const char*> names) {
    return std::any_of(names.begin(), names.end(), [&](const char* one) { return text == one; });
  };
  TORCH_CHECK_VALUE(among(space, {"aten", "prims", "ipex", "ipex_core", "mkldnn", "quantized",
                                  "ipex_quant", "quantized_decomposed"}),
                    "an op must be of aten, prims, ipex, ipex_core, mkldnn, quantized, ipex_quant, "
                    "quantized_decomposed, got ",
                    name);
  const c10::OperatorHandle found = op(name);
  bool tensors = false;
  for (const auto& argument : found.schema().arguments())
    tensors |= argument.type()->str().find("Tensor") != std::string::npos;
  const bool factory =
      among(base, {"arange", "full", "zeros", "ones", "iota", "scalar_tensor", "empty", "linspace",
                   "eye", "rand", "randn", "randint", "tril_indices", "triu_indices"});
  TORCH_CHECK_VALUE(!found.schema().is_mutable() && !among(base, {"from_file", "save", "load"}) &&
                        (tensors || factory),
                    "an op must compute and do nothing else, got ", name);
  return found;
}

inline torch::jit::Stack called(const c10::OperatorHandle& handle, torch::jit::Stack stack) {
  handle.callBoxed(stack);
  return stack;
}

// A native program, freed with this object.
class NativeProgram {
 public:
  NativeProgram(const Json& run, const std::map<std::string, at::Tensor>& tensors) {
    const Json& code = run.at("code");
    const at::Tensor words = at::empty({static_cast<std::int64_t>(code.items.size())}, at::kLong);
    std::int64_t* to = words.mutable_data_ptr<std::int64_t>();
    for (const Json& word : code.items) *to++ = word.number();
    const std::string& written = run.at("text").string();
    const at::Tensor text = at::empty({static_cast<std::int64_t>(written.size())}, at::kByte);
    std::memcpy(text.mutable_data_ptr(), written.data(), written.size());
    c10::List<at::Tensor> constants;
    for (const Json& constant : run.at("constants").items) {
      TORCH_CHECK_VALUE(constant.items.size() == 2, "a constant must have a place and a name");
      const auto found = tensors.find(constant.items[1].string());
      TORCH_CHECK_VALUE(found != tensors.end(), "a constant must be a tensor of the file");
      constants.push_back(found->second);
    }
    for (const Json& input : run.at("inputs").items) {
      TORCH_CHECK_VALUE(input.items.size() == 3, "an input must have a place, a kind and a name");
      tensor_inputs_.push_back(input.items[1].string() == "tensor");
    }
    handle_ = called(op("ipex::program_create"), {words, text, constants}).at(0).toInt();
  }
  NativeProgram(const NativeProgram&) = delete;
  NativeProgram& operator=(const NativeProgram&) = delete;
  ~NativeProgram() {
    try {
      called(op("ipex::program_free"), {handle_});
    } catch (...) {
      // The process ends, and ops are gone.
    }
  }

  std::vector<at::Tensor> run(const std::vector<Json>& inputs, const State& state) const {
    TORCH_CHECK_VALUE(inputs.size() == tensor_inputs_.size(), "a program must get its inputs");
    c10::List<at::Tensor> tensors;
    c10::List<std::int64_t> numbers;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const c10::IValue value = value_of(inputs[i], state, nullptr);
      if (tensor_inputs_[i]) {
        tensors.push_back(value.toTensor());
      } else {
        numbers.push_back(value.toInt());
      }
    }
    return called(run_, {handle_, tensors, numbers}).at(0).toTensorVector();
  }

 private:
  c10::OperatorHandle run_ = op("ipex::program_run");
  std::vector<bool> tensor_inputs_;
  std::int64_t handle_ = 0;
};

struct Step {
  std::shared_ptr<NativeProgram> program;  // null for a call of torch
  std::optional<c10::OperatorHandle> call;
  std::vector<Json> args;  // inputs of a program
  std::vector<std::pair<std::string, Json>> kwargs;
  std::vector<std::int64_t> results;
  std::vector<std::int64_t> frees;
};

}  // namespace precompiled_detail

// A tensor that a model takes.
struct PrecompiledInput {
  std::string name;
  at::ScalarType dtype;
  std::vector<std::string> shape;  // numbers, and expressions of sizes that vary
};

// A model that `Precompiled.save` has written in Python. It may be called by several threads at
// once.
class Precompiled {
 public:
  // Reads a file. Throws c10::ValueError where it is no such file, damaged, of another version, or
  // needs an op that this program does not have.
  explicit Precompiled(const std::string& path) {
    try {
      load(path);
    } catch (const c10::Error& error) {
      TORCH_CHECK_VALUE(
          false, "Precompiled: ", path,
          " must be a file of Precompiled.save that this program can run, got one where ",
          error.what_without_backtrace());
    } catch (const std::exception& error) {
      TORCH_CHECK_VALUE(false, "Precompiled: ", path,
                        " must be a file of Precompiled.save, got one where ", error.what());
    }
  }

  // The tensors among the arguments of the model, in the order in which torch.utils._pytree has
  // them. The others are fixed: they have the values of the example.
  const std::vector<PrecompiledInput>& inputs() const { return inputs_; }

  // Runs the model. Returns the leaves of its results, in that order. Throws c10::ValueError where
  // a tensor has another dtype or shape than the model takes.
  std::vector<c10::IValue> operator()(const std::vector<at::Tensor>& tensors) const {
    namespace detail = precompiled_detail;
    const at::NoGradGuard no_gradients;
    detail::State state;
    state.slots = first_;
    state.numbers = numbers_of(tensors);
    for (std::size_t i = 0; i < tensors.size(); ++i)
      state.slots.at(static_cast<std::size_t>(places_.at(i))) = tensors[i];
    for (const detail::Step& step : steps_) {
      std::vector<c10::IValue> found;
      if (step.program) {
        for (at::Tensor& one : step.program->run(step.args, state))
          found.emplace_back(std::move(one));
      } else {
        found = called(step, state);
      }
      TORCH_CHECK_VALUE(found.size() == step.results.size(), "Precompiled: a step must have ",
                        step.results.size(), " results, got ", found.size());
      for (std::size_t i = 0; i < found.size(); ++i)
        if (step.results[i] >= 0)
          state.slots.at(static_cast<std::size_t>(step.results[i])) = std::move(found[i]);
      for (const std::int64_t place : step.frees)
        state.slots.at(static_cast<std::size_t>(place)) = c10::IValue();
    }
    std::vector<c10::IValue> results;
    for (std::size_t i = 0; i < outputs_.size(); ++i) {
      c10::IValue value = detail::value_of(outputs_[i], state, nullptr);
      const bool copied =
          std::find(copied_.begin(), copied_.end(), static_cast<std::int64_t>(i)) != copied_.end();
      results.push_back(copied && value.isTensor() ? c10::IValue(value.toTensor().clone())
                                                   : std::move(value));
    }
    return results;
  }

 private:
  using Json = precompiled_detail::Json;
  static constexpr std::int64_t kFormat = 1;

  static std::vector<c10::IValue> called(const precompiled_detail::Step& step,
                                         const precompiled_detail::State& state) {
    torch::jit::Stack stack;
    const auto& arguments = step.call->schema().arguments();
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const auto& argument = arguments[i];
      const Json* given = i < step.args.size() ? &step.args[i] : nullptr;
      for (const auto& [name, value] : step.kwargs)
        if (name == argument.name()) given = &value;
      if (given != nullptr) {
        stack.push_back(precompiled_detail::laid_out(
            precompiled_detail::value_of(*given, state, argument.real_type())));
      } else {
        TORCH_CHECK_VALUE(argument.default_value().has_value(),
                          "Precompiled: ", step.call->schema().name(), " must get ",
                          argument.name());
        stack.push_back(*argument.default_value());
      }
    }
    step.call->callBoxed(stack);
    if (stack.size() == 1 && stack[0].isTensorList()) {
      std::vector<c10::IValue> found;
      for (at::Tensor one : stack[0].toTensorVector()) found.emplace_back(std::move(one));
      return found;
    }
    return stack;
  }

  void load(const std::string& path) {
    namespace detail = precompiled_detail;
    std::ifstream file(path, std::ios::binary | std::ios::ate);
    TORCH_CHECK_VALUE(file, "it cannot be read");
    const auto whole = static_cast<std::uint64_t>(file.tellg());
    file.seekg(0);
    std::uint64_t length = 0;
    file.read(reinterpret_cast<char*>(&length), sizeof length);
    TORCH_CHECK_VALUE(file && length <= whole - sizeof length,
                      "it is no complete safetensors file");
    std::string header(static_cast<std::size_t>(length), '\0');
    file.read(header.data(), static_cast<std::streamsize>(length));
    const std::uint64_t bytes = whole - sizeof length - length;
    const at::Tensor buffer = at::empty({static_cast<std::int64_t>(bytes)}, at::kByte);
    file.read(static_cast<char*>(buffer.mutable_data_ptr()), static_cast<std::streamsize>(bytes));
    TORCH_CHECK_VALUE(file, "it is no complete safetensors file");
    const Json table = detail::JsonReader(header).read();
    const Json* metadata = table.find("__metadata__");
    TORCH_CHECK_VALUE(metadata != nullptr && metadata->find("ipex.precompiled") != nullptr,
                      "there is no program");
    const std::string& text = metadata->at("ipex.precompiled").string();
    const std::map<std::string, at::Tensor> tensors = tensors_of(table, buffer);
    detail::Sha256 digest;
    digest.update(text);
    for (const auto& [name, tensor] : tensors) {
      std::ostringstream line;
      line << name << ' ' << name_of(tensor.scalar_type()) << " [";
      for (std::int64_t d = 0; d < tensor.dim(); ++d)
        line << (d == 0 ? "" : ", ") << tensor.size(d);
      line << ']';
      digest.update(line.str());
      digest.update(tensor.const_data_ptr(), static_cast<std::size_t>(tensor.nbytes()));
    }
    TORCH_CHECK_VALUE(digest.hex() == metadata->at("ipex.digest").string(),
                      "the contents are not what was written: write it again");
    document_ = detail::JsonReader(text).read();
    TORCH_CHECK_VALUE(document_.at("format").number() == kFormat, "the format is ",
                      document_.at("format").number(), ", and this header reads ", kFormat);
    TORCH_CHECK_VALUE(document_.at("kernel_api").number() == IPEX_KERNEL_API_VERSION,
                      "the kernel API is ", document_.at("kernel_api").number(),
                      ", and this header is of ", IPEX_KERNEL_API_VERSION,
                      ": call ipex.precompile again");
    read_inputs();
    read_plan(tensors);
  }

  static const char* name_of(at::ScalarType type) {
    for (const auto& one : precompiled_detail::dtypes())
      if (one.type == type) return one.name;
    return "";
  }

  static std::map<std::string, at::Tensor> tensors_of(const Json& table, const at::Tensor& buffer) {
    std::map<std::string, at::Tensor> found;
    for (const auto& [name, entry] : table.members) {
      if (name == "__metadata__") continue;
      const auto& dtype = precompiled_detail::dtype_of(entry.at("dtype").string(), true);
      const std::vector<std::int64_t> shape = precompiled_detail::integers(entry.at("shape"));
      const std::vector<std::int64_t> span = precompiled_detail::integers(entry.at("data_offsets"));
      std::int64_t size = static_cast<std::int64_t>(c10::elementSize(dtype.type));
      for (const std::int64_t one : shape) {
        TORCH_CHECK_VALUE(one >= 0 && (one == 0 || size <= buffer.numel() / one || size == 0),
                          "the tensor ", name, " has impossible sizes");
        size *= one;
      }
      TORCH_CHECK_VALUE(span.size() == 2 && span[0] >= 0 && span[1] - span[0] == size &&
                            span[1] <= buffer.numel(),
                        "the tensor ", name, " is not in the file");
      const at::Tensor part = buffer.narrow(0, span[0], size);
      const bool aligned = span[0] % static_cast<std::int64_t>(c10::elementSize(dtype.type)) == 0;
      found[name] = (aligned ? part : part.clone()).view(dtype.type).view(shape);
    }
    return found;
  }

  void read_inputs() {
    std::int64_t index = -1;
    for (const Json& one : document_.at("inputs").items) {
      ++index;
      if (one.at("dtype").is_null()) continue;
      PrecompiledInput input{one.at("name").string(),
                             precompiled_detail::dtype_of(one.at("dtype").string(), false).type,
                             {}};
      for (const Json& size : one.at("shape").items) {
        static_ = static_ && size.kind == Json::Kind::Integer;
        input.shape.push_back(size.kind == Json::Kind::Integer ? std::to_string(size.integer)
                                                               : size.string());
      }
      inputs_.push_back(std::move(input));
    }
  }

  void read_plan(const std::map<std::string, at::Tensor>& tensors) {
    namespace detail = precompiled_detail;
    const Json& plan = document_.at("plan");
    const std::int64_t slots = plan.at("slots").number();
    TORCH_CHECK_VALUE(slots >= 0 && slots < (std::int64_t{1} << 24),
                      "the number of slots is impossible");
    first_.resize(static_cast<std::size_t>(slots));
    for (const auto& [place, name] : plan.at("constants").members)
      first_.at(std::stoul(place)) = tensors.at(name.string());
    places_ = detail::integers(plan.at("inputs"));
    TORCH_CHECK_VALUE(places_.size() == inputs_.size(), "the plan has other inputs than the model");
    outputs_ = plan.at("outputs").items;
    copied_ = detail::integers(plan.at("copied"));
    for (const Json& written : plan.at("steps").items) {
      detail::Step step;
      if (const Json* run = written.find("run")) {
        TORCH_CHECK_VALUE(run->find("code") != nullptr,
                          "a program has no code: write the file again");
        step.program = std::make_shared<detail::NativeProgram>(*run, tensors);
        step.args = written.at("inputs").items;
      } else {
        step.call = detail::computing_op(written.at("call").string());
        step.args = written.at("args").items;
        step.kwargs = written.at("kwargs").members;
      }
      step.results = detail::integers(written.at("results"));
      step.frees = detail::integers(written.at("frees"));
      steps_.push_back(std::move(step));
    }
  }

  double value_of(const std::string& text, const precompiled_detail::Symbols& symbols) const {
    return precompiled_detail::evaluate(document_.at("expressions").at(text), symbols);
  }

  bool computable(const std::string& text, const precompiled_detail::Symbols& symbols) const {
    for (const Json& step : document_.at("expressions").at(text).items) {
      const Json* size = step.find("size");
      if (size != nullptr && symbols.count(size->string()) == 0) return false;
    }
    return true;
  }

  // Adds the size that a linear expression, such as 2*s0 + 1, needs to have a value.
  void solve(const std::string& text, std::int64_t wanted,
             precompiled_detail::Symbols& symbols) const {
    const Json* steps = document_.at("expressions").find(text);
    if (steps == nullptr) return;
    std::string unknown;
    for (const Json& step : steps->items) {
      const Json* size = step.find("size");
      if (size == nullptr || symbols.count(size->string()) != 0 || size->string() == unknown)
        continue;
      if (!unknown.empty()) return;
      unknown = size->string();
    }
    if (unknown.empty()) return;
    const auto at = [&](double value) {
      precompiled_detail::Symbols all = symbols;
      all[unknown] = value;
      return precompiled_detail::evaluate(*steps, all);
    };
    const double step = at(1) - at(0);
    const double found = (static_cast<double>(wanted) - at(0)) / step;
    if (step != 0 && found == std::floor(found)) symbols[unknown] = found;
  }

  // The values of the expressions of sizes, for these tensors.
  std::vector<std::int64_t> numbers_of(const std::vector<at::Tensor>& tensors) const {
    TORCH_CHECK_VALUE(tensors.size() == inputs_.size(), "Precompiled: the model takes ",
                      inputs_.size(), " tensors, got ", tensors.size());
    precompiled_detail::Symbols symbols;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const PrecompiledInput& input = inputs_[i];
      const at::Tensor& tensor = tensors[i];
      TORCH_CHECK_VALUE(tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided &&
                            tensor.scalar_type() == input.dtype,
                        "Precompiled: input ", input.name, " must be a dense tensor of ",
                        name_of(input.dtype), " on the CPU, got ",
                        tensor.defined() ? tensor.toString() : std::string("no tensor"));
      TORCH_CHECK_VALUE(static_cast<std::size_t>(tensor.dim()) == input.shape.size(),
                        "Precompiled: input ", input.name, " must have ", input.shape.size(),
                        " dimensions, got ", tensor.dim());
      for (std::size_t d = 0; d < input.shape.size(); ++d) {
        const std::string& wanted = input.shape[d];
        const bool symbol =
            wanted.find_first_not_of(
                "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_") ==
                std::string::npos &&
            (wanted[0] < '0' || wanted[0] > '9');
        if (symbol)
          symbols.emplace(wanted, static_cast<double>(tensor.size(static_cast<std::int64_t>(d))));
      }
    }
    for (std::size_t i = 0; i < tensors.size(); ++i)
      for (std::size_t d = 0; d < inputs_[i].shape.size(); ++d)
        solve(inputs_[i].shape[d], tensors[i].size(static_cast<std::int64_t>(d)), symbols);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      for (std::size_t d = 0; d < inputs_[i].shape.size(); ++d) {
        const std::string& wanted = inputs_[i].shape[d];
        const bool fixed = wanted.find_first_not_of("0123456789") == std::string::npos;
        const bool known = fixed || computable(wanted, symbols);
        const double expected = fixed ? std::stod(wanted) : known ? value_of(wanted, symbols) : -1;
        const auto size = static_cast<double>(tensors[i].size(static_cast<std::int64_t>(d)));
        bool inside = size == expected;
        if (const Json* range = document_.at("ranges").find(wanted)) {
          inside = inside && size >= range->items.at(0).real &&
                   (range->items.at(1).is_null() || size <= range->items.at(1).real);
        }
        TORCH_CHECK_VALUE(inside, "Precompiled: input ", inputs_[i].name, " must have size ",
                          wanted, " in dimension ", d, known && !fixed ? ", in its range," : "",
                          " got shape ", tensors[i].sizes());
      }
    }
    std::vector<std::int64_t> numbers;
    if (static_ && document_.at("plan").at("sizes").items.empty()) return numbers;
    for (const Json& condition : document_.at("conditions").items)
      TORCH_CHECK_VALUE(value_of(condition.string(), symbols) != 0,
                        "Precompiled: the inputs must have sizes with ", condition.string());
    for (const Json& text : document_.at("plan").at("sizes").items)
      numbers.push_back(std::llround(value_of(text.string(), symbols)));
    return numbers;
  }

  Json document_;
  std::vector<PrecompiledInput> inputs_;
  bool static_ = true;
  std::vector<c10::IValue> first_;    // what the slots hold before a run
  std::vector<std::int64_t> places_;  // slots of the inputs
  std::vector<precompiled_detail::Step> steps_;
  std::vector<Json> outputs_;
  std::vector<std::int64_t> copied_;
};

}  // namespace ipex
