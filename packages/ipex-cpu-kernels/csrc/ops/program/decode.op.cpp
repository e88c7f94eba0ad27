// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <cmath>

#include "program/program.h"

namespace ipex::program {
namespace {

constexpr const char* kOp = "program_create";
constexpr int64_t kVersion = 1;

ScalarType dtype_of(const std::string& name) {
  for (const ScalarType dtype :
       {ScalarType::Float, ScalarType::Double, ScalarType::Half, ScalarType::BFloat16,
        ScalarType::Byte, ScalarType::Char, ScalarType::Short, ScalarType::Int, ScalarType::Long,
        ScalarType::Bool, ScalarType::Float8_e5m2, ScalarType::Float8_e4m3fn,
        ScalarType::Float8_e8m0fnu})
    if (name == dtype_name(dtype)) return dtype;
  fail(kOp, ": dtype must be one that programs know, got ", name);
}

const char* kind_name(Kind kind) {
  switch (kind) {
    case Kind::kNone:
      return "None";
    case Kind::kTensor:
      return "a tensor";
    case Kind::kInt:
      return "an int";
    case Kind::kFloat:
      return "a float";
    case Kind::kBool:
      return "a bool";
    case Kind::kString:
      return "a string";
    case Kind::kDtype:
      return "a dtype";
    case Kind::kList:
      return "a list";
  }
  return "an unknown kind";
}

std::string tensor_text(const Tensor& x) {
  return std::string(x.is_contiguous() ? "a contiguous " : "a non-contiguous ") +
         dtype_name(x.scalar_type()) + (x.is_cpu() ? " tensor on the CPU" : " tensor elsewhere");
}

class Decoder {
 public:
  Decoder(const Tensor& code, const Tensor& text, const std::vector<Tensor>& constants)
      : words_(static_cast<const int64_t*>(code.const_data_ptr())),
        end_(words_ + code.numel()),
        text_(static_cast<const char*>(text.const_data_ptr())),
        text_size_(text.numel()),
        program_(std::make_shared<Program>()) {
    program_->constants.assign(constants.begin(), constants.end());
  }

  std::shared_ptr<const Program> decode() {
    const int64_t version = word();
    IPEX_CHECK(version == kVersion, kOp, ": code must have version ", kVersion, ", got ", version);
    program_->registers = count();
    states_.resize(program_->registers);
    for (size_t n = count(); n > 0; --n) {
      program_->inputs.push_back(index());
      define(program_->inputs.back()).defined = true;
    }
    program_->integers = count();
    for (size_t n = count(), i = 0; i < n; ++i) {
      IPEX_CHECK(i < program_->constants.size(), kOp, ": constants must have ", n, " tensors, got ",
                 program_->constants.size());
      define(index()).constant = &program_->constants[i];
    }
    std::vector<int32_t> outputs;
    for (size_t n = count(); n > 0; --n) outputs.push_back(index());
    const size_t instructions = count();
    program_->instructions.reserve(instructions);
    for (size_t i = 0; i < instructions; ++i) {
      try {
        instruction();
      } catch (const std::exception& error) {
        fail("program: instruction ", i, " (", program_->instructions.back().op,
             "): ", error.what());
      }
    }
    for (const int32_t output : outputs)
      program_->outputs.push_back({output, readable(output).constant});
    IPEX_CHECK(words_ == end_, kOp, ": code must end after the last instruction, got more words");
    return program_;
  }

 private:
  struct State {
    bool defined = false;
    bool result = false;  // of an instruction, which may be freed
    const OptionalTensor* constant = nullptr;
  };

  int64_t word() {
    IPEX_CHECK(words_ < end_, kOp, ": code must be whole, got its beginning only");
    return *words_++;
  }

  // A number of things that follow: never more than there are words.
  size_t count() {
    const int64_t n = word();
    IPEX_CHECK(n >= 0 && n <= kMaxRegisters, kOp, ": code must have counts in range, got ", n);
    return static_cast<size_t>(n);
  }

  int32_t index() {
    const int64_t i = word();
    IPEX_CHECK(i >= 0 && i < static_cast<int64_t>(program_->registers), kOp,
               ": code must name registers in range, got ", i);
    return static_cast<int32_t>(i);
  }

  std::string string() {
    const int64_t offset = word(), size = word();
    IPEX_CHECK(offset >= 0 && size >= 0 && offset <= text_size_ && size <= text_size_ - offset, kOp,
               ": code must point into its text, got ", offset);
    return std::string(text_ + offset, static_cast<size_t>(size));
  }

  State& define(int32_t i) {
    State& state = states_[static_cast<size_t>(i)];
    IPEX_CHECK(!state.defined && !state.constant, kOp, ": register ", i,
               " must be written once, got written again");
    return state;
  }

  const State& readable(int32_t i) const {
    const State& state = states_[static_cast<size_t>(i)];
    IPEX_CHECK(state.defined || state.constant, kOp, ": register ", i,
               " must be written before it is read, got a read");
    return state;
  }

  Argument argument() {
    Argument value;
    const int64_t kind = word();
    IPEX_CHECK(kind >= 0 && kind <= static_cast<int64_t>(Kind::kList), kOp,
               ": code must have known kinds, got ", kind);
    value.kind = static_cast<Kind>(kind);
    switch (value.kind) {
      case Kind::kNone:
        break;
      case Kind::kTensor: {
        const int32_t i = index();
        value.integer = i;
        value.constant = readable(i).constant;
        break;
      }
      case Kind::kInt:
        value.is_input = word() != 0;
        value.integer = word();
        IPEX_CHECK(!value.is_input || (value.integer >= 0 &&
                                       value.integer < static_cast<int64_t>(program_->integers)),
                   kOp, ": code must name integers in range, got ", value.integer);
        break;
      case Kind::kFloat:
        value.real = std::bit_cast<double>(word());
        break;
      case Kind::kBool:
        value.integer = word();
        break;
      case Kind::kString:
        value.text = string();
        break;
      case Kind::kDtype:
        value.dtype = dtype_of(string());
        break;
      case Kind::kList:
        for (size_t n = count(); n > 0; --n) {
          value.elements.push_back(argument());
          IPEX_CHECK(value.elements.back().kind != Kind::kList, kOp,
                     ": code must have no lists of lists, got one");
        }
        break;
    }
    return value;
  }

  void instruction() {
    Instruction& one = program_->instructions.emplace_back();
    one.op = string();
    const Entry* entry = find(one.op);
    IPEX_CHECK(entry, "there is no native function of this name");
    one.function = entry->function;
    program_->has_team = program_->has_team && !has_own_threads(one.op);
    const size_t arguments = count();
    IPEX_CHECK(arguments == entry->parameters.size(), "must have ", entry->parameters.size(),
               " arguments, got ", arguments);
    for (size_t i = 0; i < arguments; ++i) {
      one.arguments.push_back(argument());
      check_kind(one.arguments.back(), entry->parameters[i], i);
    }
    const size_t results = count();
    IPEX_CHECK(results == entry->results, "must have ", entry->results, " results, got ", results);
    for (size_t i = 0; i < results; ++i) {
      one.results.push_back(index());
      State& state = define(one.results.back());
      state.defined = state.result = true;
    }
    for (size_t n = count(); n > 0; --n) {
      const int64_t both = word();
      const int64_t i = both / 2;
      IPEX_CHECK(i >= 0 && i < static_cast<int64_t>(program_->registers) &&
                     states_[static_cast<size_t>(i)].defined &&
                     states_[static_cast<size_t>(i)].result,
                 "must free results only, got register ", i);
      states_[static_cast<size_t>(i)].defined = false;
      one.frees.push_back({static_cast<int32_t>(i), both % 2 != 0});
    }
  }

  static void check_kind(const Argument& value, const Parameter& parameter, size_t i) {
    const bool none = value.kind == Kind::kNone && parameter.optional;
    IPEX_CHECK(none || value.kind == parameter.kind, "argument ", i, " must be ",
               kind_name(parameter.kind), ", got ", kind_name(value.kind));
    for (const Argument& element : value.elements)
      IPEX_CHECK(element.kind == parameter.element, "argument ", i,
                 " must be a list of elements that are ", kind_name(parameter.element), ", got ",
                 kind_name(element.kind));
  }

  static constexpr int64_t kMaxRegisters = int64_t{1} << 24;

  const int64_t* words_;
  const int64_t* end_;
  const char* text_;
  int64_t text_size_;
  std::shared_ptr<Program> program_;
  std::vector<State> states_;
};

}  // namespace

std::shared_ptr<const Program> decode(const Tensor& code, const Tensor& text,
                                      const std::vector<Tensor>& constants) {
  IPEX_CHECK(code.is_cpu() && code.scalar_type() == ScalarType::Long && code.is_contiguous(), kOp,
             ": code must be a contiguous int64 tensor on the CPU, got ", tensor_text(code));
  IPEX_CHECK(text.is_cpu() && text.scalar_type() == ScalarType::Byte && text.is_contiguous(), kOp,
             ": text must be a contiguous uint8 tensor on the CPU, got ", tensor_text(text));
  for (const Tensor& constant : constants)
    IPEX_CHECK(constant.is_cpu(), kOp, ": constants must be on the CPU");
  return Decoder(code, text, constants).decode();
}

}  // namespace ipex::program
