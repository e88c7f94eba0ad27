// SPDX-License-Identifier: Apache-2.0
// Definitions, not exported, of what newer releases of glibc and libstdc++ have in their libraries
// and the oldest supported system (manylinux_2_28: glibc 2.28, libstdc++ of GCC 8) has not.
// `auditwheel show` tells what is missing.
#include <new>
#include <sstream>
#include <string>

#if defined(__linux__) && defined(__GLIBC__)
// libstdc++ counts references without atomic instructions while this is set: never. glibc 2.32.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;
#endif

#if defined(__GLIBCXX__) && _GLIBCXX_USE_CXX11_ABI
// GLIBCXX_3.4.26 and 3.4.29: members that became functions of the library.
template std::basic_stringstream<char>::basic_stringstream();
template std::basic_ostringstream<char>::basic_ostringstream();
template std::string std::basic_stringbuf<char>::str() const&;
template std::string std::basic_stringbuf<char>::str() &&;

// GLIBCXX_3.4.29. Weak, since compilers made to run on older systems bring it along in an archive.
namespace std {
__attribute__((weak)) void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std
#endif
