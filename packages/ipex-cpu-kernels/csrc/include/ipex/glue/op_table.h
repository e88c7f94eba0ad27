// SPDX-License-Identifier: Apache-2.0
// The ops by name, as functions that take decoded arguments: what programs call. A call through
// torch's dispatcher boxes every argument and costs more than a small op itself.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

namespace ipex::program {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

enum class Kind : uint8_t { kNone, kTensor, kInt, kFloat, kBool, kString, kDtype, kList };

// What an argument of a function may be.
struct Parameter {
  Kind kind;
  bool optional = false;
  Kind element = Kind::kNone;  // of a list
};

// One argument, decoded when the program is made.
struct Argument {
  Kind kind = Kind::kNone;
  int64_t integer = 0;  // the value; of a tensor or an integer input: its register
  double real = 0;
  bool is_input = false;                     // an integer that is given at each run
  const OptionalTensor* constant = nullptr;  // a tensor that is not in a register
  ScalarType dtype = ScalarType::Float;
  std::string text;
  std::vector<Argument> elements;
};

// The values of one run.
struct Frame {
  OptionalTensor* registers;
  const int64_t* integers;
};

using Function = void (*)(const Frame& frame, const Argument* arguments, const int32_t* results);

struct Entry {
  Function function;
  std::vector<Parameter> parameters;
  size_t results;
};

// The entry of an op, or nullptr.
const Entry* find(const std::string& name);
// For static initializers only. `name` must be a literal.
void add(const char* name, Entry entry);

// How an argument of type T is described and read.
template <class T>
struct Reader;

template <>
struct Reader<OptionalTensor> {
  static constexpr Parameter kParameter{Kind::kTensor, true};
  static const OptionalTensor& get(const Frame& frame, const Argument& argument) {
    static const OptionalTensor none;
    if (argument.kind == Kind::kNone) return none;
    return argument.constant ? *argument.constant : frame.registers[argument.integer];
  }
};

template <>
struct Reader<Tensor> {
  static constexpr Parameter kParameter{Kind::kTensor};
  static const Tensor& get(const Frame& frame, const Argument& argument) {
    return *(argument.constant ? *argument.constant : frame.registers[argument.integer]);
  }
};

template <>
struct Reader<int64_t> {
  static constexpr Parameter kParameter{Kind::kInt};
  static int64_t get(const Frame& frame, const Argument& argument) {
    return argument.is_input ? frame.integers[argument.integer] : argument.integer;
  }
};

template <>
struct Reader<double> {
  static constexpr Parameter kParameter{Kind::kFloat};
  static double get(const Frame&, const Argument& argument) { return argument.real; }
};

template <>
struct Reader<bool> {
  static constexpr Parameter kParameter{Kind::kBool};
  static bool get(const Frame&, const Argument& argument) { return argument.integer != 0; }
};

template <>
struct Reader<std::string> {
  static constexpr Parameter kParameter{Kind::kString};
  static const std::string& get(const Frame&, const Argument& argument) { return argument.text; }
};

template <>
struct Reader<ScalarType> {
  static constexpr Parameter kParameter{Kind::kDtype};
  static ScalarType get(const Frame&, const Argument& argument) { return argument.dtype; }
};

template <class T>
struct Reader<std::optional<T>> {
  static constexpr Parameter kParameter{Reader<T>::kParameter.kind, true};
  static std::optional<T> get(const Frame& frame, const Argument& argument) {
    if (argument.kind == Kind::kNone) return std::nullopt;
    return Reader<T>::get(frame, argument);
  }
};

template <class T>
struct Reader<std::vector<T>> {
  static constexpr Parameter kParameter{Kind::kList, false, Reader<T>::kParameter.kind};
  static std::vector<T> get(const Frame& frame, const Argument& argument) {
    std::vector<T> values;
    values.reserve(argument.elements.size());
    for (const Argument& element : argument.elements)
      values.push_back(Reader<T>::get(frame, element));
    return values;
  }
};

// The function behind a function pointer that is known at compile time.
template <auto kFunction>
struct Adapter;

template <class Result, class... Args, Result (*kFunction)(Args...)>
struct Adapter<kFunction> {
  static void call(const Frame& frame, const Argument* arguments, const int32_t* results) {
    call_with(frame, arguments, results, std::index_sequence_for<Args...>{});
  }

  static Entry entry() {
    return {
        &call, {Reader<std::decay_t<Args>>::kParameter...}, count(static_cast<Result*>(nullptr))};
  }

 private:
  template <size_t... I>
  static void call_with(const Frame& frame, const Argument* arguments, const int32_t* results,
                        std::index_sequence<I...>) {
    if constexpr (std::is_void_v<Result>) {
      kFunction(Reader<std::decay_t<Args>>::get(frame, arguments[I])...);
    } else {
      store(frame, results, kFunction(Reader<std::decay_t<Args>>::get(frame, arguments[I])...));
    }
  }

  static void store(const Frame& frame, const int32_t* results, Tensor value) {
    frame.registers[results[0]] = std::move(value);
  }

  template <class... T>
  static void store(const Frame& frame, const int32_t* results, std::tuple<T...> values) {
    std::apply(
        [&](T&... value) {
          size_t i = 0;
          ((frame.registers[results[i++]] = std::move(value)), ...);
        },
        values);
  }

  static size_t count(const void*) { return 0; }
  static size_t count(const Tensor*) { return 1; }
  template <class... T>
  static size_t count(const std::tuple<T...>*) {
    return sizeof...(T);
  }
};

}  // namespace ipex::program

// Registers an op with torch and in the table: in the body of STABLE_TORCH_LIBRARY_IMPL.
#define IPEX_IMPL(library, name, function)     \
  (library.impl(name, TORCH_BOX(&(function))), \
   ::ipex::program::add(name, ::ipex::program::Adapter<&(function)>::entry()))
