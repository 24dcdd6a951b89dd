// run FILE: one call of an exported function. The file stands at 2^44, where the addresses in it point.
// Its first numbers are the function and its arguments.
#include <fcntl.h>
#include <sys/mman.h>
#include <cstdint>
#pragma weak step
#pragma weak squares
extern "C" void step(const int64_t*, const int32_t*, int64_t, const float*, const float*, int32_t);
extern "C" void squares(const int64_t*, const int32_t*, int64_t, int64_t*, int64_t, int32_t);
int main(int, char** arguments) {
  const int file = open(arguments[1], O_RDWR);
  int64_t* x = (int64_t*)(1L << 44);
  if (mmap(x, 1L << 30, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) != x) return 3;
  if (x[0]) squares((int64_t*)x[1], (int32_t*)x[2], x[3], (int64_t*)x[4], x[0], 1);
  else step((int64_t*)x[1], (int32_t*)x[2], x[3], (float*)x[4], (float*)x[5], 1);
}
