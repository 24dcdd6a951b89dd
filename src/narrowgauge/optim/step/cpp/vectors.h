// The optimizer's step on a CPU, in five files that step_cpp.py joins: vectors.h, codes.h (rounding, formats, codes of
// weights and states), rules.h, walk.h (a step of one lane, and the walk over all tensors), norm.h (of gradients).
// kernel.py, codes.py and rules/ define what each function computes. A library appends a struct Row of a storage's types.
//     word: the bits of a stored element           lane: 32 bits of a vector; a word of 1 or 2 bytes stands at its top
//     group: two vectors of elements               plane: a tensor of words beside the weight, of one or more fields
//     field: the bits of a plane for one state     code: how a field stores a float32
//     seen: the visible bits of a weight           tail: its bits below these
//     program: a part of a tensor for a thread     bound: the largest magnitude of a state in a block of 256 elements
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__) && defined(__FMA__)
#define LANES 8
#else
#define LANES 4
#endif
#define INLINE static inline __attribute__((always_inline))
#define APART static __attribute__((noinline))
#define ALWAYS __attribute__((always_inline))
#define VECTOR(TYPE, BYTES) TYPE __attribute__((vector_size(BYTES)))

// ── vectors: this part and the next know the processor, nothing after them does ──────────────────

typedef VECTOR(int32_t, 4 * LANES) Ints;
typedef VECTOR(uint32_t, 4 * LANES) Unsigned;
typedef VECTOR(float, 4 * LANES) Floats;
typedef VECTOR(char, 4 * LANES) Bytes;
typedef VECTOR(double, 4 * LANES) Doubles;
typedef VECTOR(uint64_t, 4 * LANES) Longs;

// Two vectors of elements: while one waits for a division, the other goes on.
struct Group { Ints a, b; };
constexpr int GROUP = 2 * LANES;
constexpr int32_t SIGN_BIT = INT32_MIN, MAGNITUDE = INT32_MAX, MANTISSA = 0x7FFFFF, EXPONENT = 0x7F800000;
constexpr int32_t UPPER = -65536;
constexpr float INFINITE = __builtin_inff();

template <class X> INLINE X at_address(const char* p) {
  X x;
  memcpy(&x, p, sizeof x);
  return x;
}
template <class X> INLINE void put(char* p, const X& x) { memcpy(p, &x, sizeof x); }

INLINE Floats float_of(Ints x) { return (Floats)x; }
INLINE Ints int_of(Floats x) { return (Ints)x; }
INLINE float float_of(int32_t x) { return __builtin_bit_cast(float, x); }
INLINE int32_t int_of(float x) { return __builtin_bit_cast(int32_t, x); }

// One number in all lanes. A sum with +0 would lose the sign of -0.
INLINE Floats splat(Floats x) { return x; }
INLINE Ints splat(Ints x) { return x; }
INLINE Floats splat(float x) { return x - Floats{}; }
INLINE Ints splat(int32_t x) { return x | Ints{}; }
template <class A, class B> INLINE auto where(Ints condition, A a, B b) {
  return condition ? splat(a) : splat(b);
}

// Shift down with zeros from above. Shift up, or down with copies of the sign.
INLINE Ints shifted_down(Ints x, int bits) { return (Ints)((Unsigned)x >> bits); }
INLINE Ints moved(Ints x, int bits) { return bits >= 0 ? x << bits : x >> -bits; }
constexpr float power(int exponent) { return __builtin_bit_cast(float, (exponent + 127) << 23); }

// What an operation is with AVX512, with AVX2, and on any other processor or with clang. Of these g++
// would write two instructions, or none.
#if defined(__clang__) || LANES == 4
#define BY_LANES(FOR_16, FOR_8, OTHERWISE) OTHERWISE
#elif LANES == 16
#define BY_LANES(FOR_16, FOR_8, OTHERWISE) FOR_16
#else
#define BY_LANES(FOR_16, FOR_8, OTHERWISE) FOR_8
#endif
#define AVX512(NAME, ...) __builtin_ia32_##NAME##512_mask(__VA_ARGS__)
#define AVX2(NAME, ...) __builtin_ia32_##NAME##256(__VA_ARGS__)
INLINE Floats roots(Floats x) {
  for (int k = 0; k < LANES; k++) x[k] = __builtin_sqrtf(x[k]);
  return x;
}
INLINE Floats root(Floats x) { return BY_LANES(AVX512(sqrtps, x, x, -1, 4), AVX2(sqrtps, x), roots(x)); }
INLINE Ints smaller(Ints a, Ints b) {
  return BY_LANES(AVX512(pminsd, a, b, a, -1), AVX2(pminsd, a, b), (a < b ? a : b));
}
INLINE Ints larger(Ints a, Ints b) {
  return BY_LANES(AVX512(pmaxsd, a, b, a, -1), AVX2(pmaxsd, a, b), (a > b ? a : b));
}
INLINE Ints smaller(Ints a, int32_t b) { return smaller(a, splat(b)); }
INLINE Ints larger(Ints a, int32_t b) { return larger(a, splat(b)); }
// As the processor's: b where a is NaN.
INLINE Floats smaller(Floats a, Floats b) {
  return BY_LANES(AVX512(minps, a, b, a, -1, 4), AVX2(minps, a, b), (a < b ? a : b));
}
INLINE Floats larger(Floats a, Floats b) {
  return BY_LANES(AVX512(maxps, a, b, a, -1, 4), AVX2(maxps, a, b), (a > b ? a : b));
}
// Of integers without a sign.
INLINE Ints smaller_unsigned(Ints a, int32_t b) {
  return BY_LANES(AVX512(pminud, a, splat(b), a, -1), AVX2(pminud, a, splat(b)),
                  (Ints)((Unsigned)a < (Unsigned)splat(b) ? a : splat(b)));
}
// The bits of a where a mask has ones, else of b, which has zeros there, unless the mask is of bytes.
template <int32_t MASK> INLINE Ints chosen(Ints a, Ints b) {
  constexpr bool IS_OF_BYTES = MASK == -1 || MASK == -256 || MASK == -65536 || MASK == -16777216;
  const auto by_bits = [&] {
    if constexpr (!IS_OF_BYTES) return (a & MASK) | b;
    else return BY_LANES(b, (Ints)AVX2(pblendvb, (Bytes)b, (Bytes)a, (Bytes)splat(MASK)), ((a & MASK) | (b & ~MASK)));
  };
  return BY_LANES(AVX512(pternlogd, splat(MASK), a, b, 0xCA, -1), by_bits(), by_bits());
}
// Not below `least` where x is above 0.
INLINE Ints held(Ints code, Ints x, int32_t least) { return larger(code, (Ints)(x > 0 & least)); }
// Whether one of two vectors has a NaN in a lane, where it is cheap to ask.
#if !defined(__clang__) && LANES == 16
constexpr bool ASKS = true;
INLINE bool any_nan(Floats a, Floats b) {
  return __builtin_expect(__builtin_ia32_cmpps512_mask(a, b, 3, -1, 4) != 0, 0);
}
#else
constexpr bool ASKS = false;
INLINE bool any_nan(Floats, Floats) { return false; }
#endif
// a * b + c where the product is exact: fused or not, the result is the same.
INLINE Floats fused(Floats a, Floats b, Floats c) {
  return BY_LANES(AVX512(vfmaddps, a, b, c, -1, 4), AVX2(vfmaddps, a, b, c), (a * b + c));
}

// ── loads and stores of elements of 1, 2 or 4 bytes ──────────────────────────────────────────────
// A load puts elements at the top of their lanes. A store writes the bytes of each lane from a bit on.

#if defined(__clang__) || LANES == 4
template <int BYTES> struct Elements { typedef Ints V; };
template <> struct Elements<1> { typedef VECTOR(uint8_t, LANES) V; };
template <> struct Elements<2> { typedef VECTOR(uint16_t, 2 * LANES) V; };
template <int BYTES> INLINE Ints widened(const char* p) {
  return __builtin_convertvector(at_address<typename Elements<BYTES>::V>(p), Ints);
}
template <int BYTES> INLINE void narrowed(char* p, Ints x) {
  put(p, __builtin_convertvector(x, typename Elements<BYTES>::V));
}
#elif LANES == 16
typedef VECTOR(char, 16) Bytes16;
typedef VECTOR(short, 32) Halves16;
template <int BYTES> INLINE Ints widened(const char* p) {
  if constexpr (BYTES == 1) return __builtin_ia32_pmovzxbd512_mask(at_address<Bytes16>(p), Ints{}, -1);
  if constexpr (BYTES == 2) return __builtin_ia32_pmovzxwd512_mask(at_address<Halves16>(p), Ints{}, -1);
  return at_address<Ints>(p);
}
// Moves the words from `first` on to the tops of the lanes. And back from those of two vectors.
INLINE Ints tops(VECTOR(short, 64) words, int first) {
  VECTOR(short, 64) places;
  for (int k = 0; k < 32; k++) places[k] = first + k / 2;
  return (Ints)__builtin_ia32_permvarhi512_mask(words, places, (VECTOR(short, 64)){}, 0xAAAAAAAA);
}
INLINE Ints joined_tops(Ints a, Ints b) {
  VECTOR(short, 64) places;
  for (int k = 0; k < 32; k++) places[k] = 2 * k + 1;
  typedef VECTOR(short, 64) Shorts;
  return (Ints)__builtin_ia32_vpermt2varhi512_mask(places, (Shorts)a, (Shorts)b, -1);
}
template <int BYTES> INLINE void narrowed(char* p, Ints x) {
  if constexpr (BYTES == 1) put(p, __builtin_ia32_pmovdb512_mask(x, Bytes16{}, -1));
  if constexpr (BYTES == 2) put(p, __builtin_ia32_pmovdw512_mask(x, Halves16{}, -1));
}
#else
// AVX2 shuffles the bytes of each half of 16 bytes: widen from a half that is loaded twice.
typedef VECTOR(long long, 16) Longs2;
typedef VECTOR(long long, 32) Longs4;
constexpr char NO_BYTE = -128;
INLINE Ints shuffled(Longs4 x, Bytes places) { return (Ints)__builtin_ia32_pshufb256((Bytes)x, places); }
INLINE Longs4 loaded_twice(const char* p) { return __builtin_ia32_vbroadcastsi256(at_address<Longs2>(p)); }
// Move the elements from the first one on to the tops of the eight lanes.
template <int BYTES> constexpr Bytes to_lanes(int first) {
  Bytes places;
  for (int j = 0; j < 32; j++) {
    const int byte = j % 4 - (4 - BYTES);
    places[j] = byte < 0 ? NO_BYTE : (first + j / 4) * BYTES + byte;
  }
  return places;
}
// Move one byte of each lane, from a bit on, to the places from the first one on in its half.
constexpr Bytes from_lanes(int bit, int first) {
  Bytes places;
  for (int j = 0; j < 32; j++) {
    const int lane = j % 16 - first;
    places[j] = lane >= 0 && lane < 4 ? 4 * lane + bit / 8 : NO_BYTE;
  }
  return places;
}
#endif

template <int BYTES> INLINE Group load(const char* p) {
  if constexpr (BYTES == 4) return {at_address<Ints>(p), at_address<Ints>(p + 4 * LANES)};
#if defined(__clang__) || LANES != 8
#if !defined(__clang__) && LANES == 16
  if constexpr (BYTES == 2) {
    const auto words = at_address<VECTOR(short, 64)>(p);
    return {tops(words, 0), tops(words, 16)};
  }
#endif
  const int up = 32 - 8 * BYTES;
  return {widened<BYTES>(p) << up, widened<BYTES>(p + BYTES * LANES) << up};
#else
  if constexpr (BYTES == 2) {
    const Bytes places = to_lanes<2>(0);
    return {shuffled(loaded_twice(p), places), shuffled(loaded_twice(p + 16), places)};
  }
  const Longs4 bytes = loaded_twice(p);
  return {shuffled(bytes, to_lanes<1>(0)), shuffled(bytes, to_lanes<1>(8))};
#endif
}

template <int BYTES, int BIT = 32 - 8 * BYTES> INLINE void store(char* p, Group x) {
  if constexpr (BYTES == 4) {
    put(p, x.a);
    put(p + 4 * LANES, x.b);
    return;
  }
#if defined(__clang__) || LANES != 8
#if !defined(__clang__) && LANES == 16
  if constexpr (BYTES == 2) return put(p, joined_tops(moved(x.a, 16 - BIT), moved(x.b, 16 - BIT)));
#endif
  narrowed<BYTES>(p, shifted_down(x.a, BIT));
  narrowed<BYTES>(p + BYTES * LANES, shifted_down(x.b, BIT));
#else
  if constexpr (BYTES == 2) {
    const Ints a = BIT == 16 ? shifted_down(x.a, 16) : shifted_down(x.a, BIT) & 0xFFFF;
    const Ints b = BIT == 16 ? shifted_down(x.b, 16) : shifted_down(x.b, BIT) & 0xFFFF;
    put(p, __builtin_ia32_permdi256((Longs4)__builtin_ia32_packusdw256(a, b), 0xD8));
    return;
  }
  const Ints both = shuffled((Longs4)x.a, from_lanes(BIT, 0)) | shuffled((Longs4)x.b, from_lanes(BIT, 4));
  const Longs4 joined = (Longs4)__builtin_ia32_permvarsi256(both, (Ints){0, 4, 1, 5});
  put(p, __builtin_ia32_extract128i256(joined, 0));
#endif
}

// Fetch what a later group reads: the processor's own prefetch leaves a loop of many streams waiting.
template <int BYTES> INLINE void prefetch(const char* p) {
  for (int k = 0; k < BYTES * GROUP; k += 64) __builtin_prefetch(p + 512 + k);
}
