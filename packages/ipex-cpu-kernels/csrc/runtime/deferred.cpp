// SPDX-License-Identifier: Apache-2.0
#include "ipex/glue/deferred.h"

#include <string_view>

namespace ipex {
namespace {

const Deferred* first = nullptr;

}  // namespace

Deferred::Deferred(const char* library, const char* schema, Boxed* function, const char* key)
    : library_(library), schema_(schema), function_(function), key_(key), next_(first) {
  first = this;
}

bool Deferred::define(const char* library, const char* name) {
  using Library = torch::stable::detail::StableLibrary;
  for (const Deferred* op = first; op != nullptr; op = op->next_) {
    const std::string_view schema = op->schema_;
    if (std::string_view(library) != op->library_ || schema.substr(0, schema.find('(')) != name)
      continue;
    // Never freed: the end of a library object would take its ops away.
    auto* fragment =
        new Library(Library::Kind::FRAGMENT, op->library_, nullptr, __FILE__, __LINE__);
    fragment->def(op->schema_);
    auto* kernels = new Library(Library::Kind::IMPL, op->library_, op->key_, __FILE__, __LINE__);
    kernels->impl(name, op->function_);
    return true;
  }
  return false;
}

}  // namespace ipex
