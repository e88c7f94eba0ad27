// SPDX-License-Identifier: Apache-2.0
// Runs the models that make_models.py has written, and compares with what they gave in Python:
//
//   run_models FOLDER
//
// TorchScript files and AOTInductor packages find their ops once the library of ipex is linked; a
// precompiled file has a reader of its own.
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/script.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include <ipex/c_api.h>
#include <ipex/torch/precompiled.h>

namespace {

// A tensor, or a tuple of tensors, that torch.save has written.
c10::IValue read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, "cannot read ", path);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  return torch::jit::pickle_load(bytes);
}

bool same(const char* what, const torch::Tensor& got, const torch::Tensor& wanted) {
  const bool equal = got.sizes() == wanted.sizes() && got.dtype() == wanted.dtype() &&
                     torch::allclose(got.to(torch::kFloat), wanted.to(torch::kFloat), 2e-2, 2e-2);
  std::cout << what << ": " << (equal ? "same as in Python" : "DIFFERENT") << '\n';
  return equal;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: run_models FOLDER\n";
    return 2;
  }
  const std::string folder = std::string(argv[1]) + "/";
  try {
    std::cout << "ISA level " << ipex_cpu_level() << '\n';
    const c10::InferenceMode guard;
    const torch::Tensor input = read(folder + "input.pt").toTensor();
    const torch::Tensor wanted = read(folder + "output.pt").toTensor();

    torch::jit::Module script = torch::jit::load(folder + "model.ts");
    const torch::Tensor from_script = script.forward({input}).toTensor();

    torch::inductor::AOTIModelPackageLoader package(folder + "model.pt2");
    const torch::Tensor from_package = package.run({input}).at(0);

    const ipex::Precompiled precompiled(folder + "model.safetensors");
    const torch::Tensor from_program = precompiled({input}).at(0).toTensor();

    torch::jit::Module int8 = torch::jit::load(folder + "int8.ts");
    const c10::IValue arguments = read(folder + "int8_input.pt");
    const torch::Tensor from_int8 =
        int8.forward(arguments.toTupleRef().elements().vec()).toTensor();

    bool all = same("TorchScript", from_script, wanted);
    all = same("AOTInductor", from_package, wanted) && all;
    all = same("Precompiled", from_program, wanted) && all;
    all = same("INT8 TorchScript", from_int8, read(folder + "int8_output.pt").toTensor()) && all;
    return all ? 0 : 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
