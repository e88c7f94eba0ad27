// SPDX-License-Identifier: Apache-2.0
// Preloaded where the xpu tests run on a CUDA device:
// - The run-time compiler of intel-sycl-rt 2026.1 opens its device library by a path of its build;
// it is read
//   from $SYCL_LIBCLC_DIR instead.
// - A torch with CUDA sees no GPU (see also hide_cuda.cpp).
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char* place(const char* path, char* buffer, size_t size) {
  static const char built[] = "/lib/clang/22/lib/libclc/";
  const char* folder = getenv("SYCL_LIBCLC_DIR");
  if (folder == NULL || path == NULL || strncmp(path, built, sizeof built - 1) != 0) return path;
  snprintf(buffer, size, "%s/%s", folder, path + sizeof built - 1);
  return buffer;
}

#define ORIGINAL(name)                               \
  static __typeof__(name)* original;                 \
  if (!original) original = dlsym(RTLD_NEXT, #name); \
  char buffer[4096]

int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const int mode = va_arg(more, int);
  va_end(more);
  ORIGINAL(open);
  return original(place(path, buffer, sizeof buffer), flags, mode);
}
int open64(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const int mode = va_arg(more, int);
  va_end(more);
  ORIGINAL(open64);
  return original(place(path, buffer, sizeof buffer), flags, mode);
}
int stat(const char* restrict path, struct stat* restrict result) {
  ORIGINAL(stat);
  return original(place(path, buffer, sizeof buffer), result);
}
int stat64(const char* restrict path, struct stat64* restrict result) {
  ORIGINAL(stat64);
  return original(place(path, buffer, sizeof buffer), result);
}
int access(const char* path, int mode) {
  ORIGINAL(access);
  return original(place(path, buffer, sizeof buffer), mode);
}

int cudaGetDeviceCount(int* count) {
  *count = 0;
  return 100;  // cudaErrorNoDevice
}
