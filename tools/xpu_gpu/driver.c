// SPDX-License-Identifier: Apache-2.0
// A libcuda.so.1 that has one device and does nothing: kernels can be compiled for a GPU where
// there is none (prebuild.sh). What a program asks for an H100 is answered; a module is its text.
// The other functions that the adapter links are added by prebuild.sh and return success.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct Module {
  unsigned count;
  char* kernels[256];
};

int cuDeviceGetCount(int* count) { return *count = 1, 0; }
int cuDeviceGet(int* device, int index) { return *device = index, 0; }
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuDeviceGetName(char* name, int size, int device) {
  return snprintf(name, (size_t)size, "no device %d", device), 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int device) { return *bytes = 80ul << 30, device; }
int cuMemGetInfo_v2(size_t* left, size_t* all) { return *left = *all = 80ul << 30, 0; }
int cuDeviceGetUuid_v2(char* uuid, int device) { return memset(uuid, 1, 16), device; }
int cuDeviceGetPCIBusId(char* text, int size, int device) {
  return snprintf(text, (size_t)size, "0000:00:%02d.0", device), 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  switch (attribute) {  // CUdevice_attribute
    case 1:             // threads of a block, and in its first two dimensions
    case 2:
    case 3:
      return *value = 1024, device;
    case 4:
      return *value = 64, device;
    case 5:  // blocks of a grid
      return *value = 2147483647, device;
    case 6:
    case 7:
      return *value = 65535, device;
    case 8:  // shared memory of a block
      return *value = 49152, device;
    case 10:  // threads of a warp
      return *value = 32, device;
    case 12:  // registers of a block, of a multiprocessor
    case 82:
      return *value = 65536, device;
    case 16:  // multiprocessors
      return *value = 132, device;
    case 39:  // threads of a multiprocessor
      return *value = 2048, device;
    case 75:  // compute capability
      return *value = 9, device;
    case 76:
      return *value = 0, device;
    case 81:  // shared memory of a multiprocessor, of a block that asks for it
    case 97:
      return *value = 232448, device;
    default:
      return *value = 1, device;
  }
}
int cuCtxGetCurrent(void** context) { return *context = context, 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { return *context = context, device; }
int cuCtxGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, 0; }
int cuEventCreate(void** event, unsigned flags) { return *event = event, (int)flags & 0; }
int cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  return *stream = stream, ((int)flags | priority) & 0;
}
int cuMemGetAllocationGranularity(size_t* bytes, const void* properties, int option) {
  return *bytes = 2 << 20, (properties == NULL) & option & 0;
}
int cuModuleLoadDataEx(struct Module** module, const void* image, unsigned count, void* options,
                       void* values) {
  static const char entry[] = ".visible .entry ";
  struct Module* made = *module = calloc(1, sizeof *made);
  for (const char* at = image; (at = strstr(at, entry)) != NULL && made->count < 256;) {
    at += sizeof entry - 1;
    made->kernels[made->count++] = strndup(at, strcspn(at, "("));
  }
  return ((int)count & 0) | (options == values && 0);
}
int cuModuleGetFunctionCount(unsigned* count, struct Module* module) {
  return *count = module->count, 0;
}
int cuModuleEnumerateFunctions(void** functions, unsigned count, struct Module* module) {
  return memcpy(functions, module->kernels, count * sizeof *functions), 0;
}
int cuFuncGetName(const char** name, void* function) { return *name = function, 0; }
int cuModuleGetFunction(void** function, struct Module* module, const char* name) {
  for (unsigned i = 0; i < module->count; ++i) {
    if (strcmp(module->kernels[i], name) == 0) return *function = module->kernels[i], 0;
  }
  return 500;  // not found
}
int cuFuncGetAttribute(int* value, int attribute, void* function) {
  return *value = attribute == 0 ? 1024 : 32, function == NULL;
}
int cuGetErrorName(int error, const char** text) { return *text = "error", error & 0; }
int cuGetErrorString(int error, const char** text) { return *text = "error", error & 0; }
