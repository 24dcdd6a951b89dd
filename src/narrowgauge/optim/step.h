// The optimizer's step on a CPU: every code, weight and rule, and one walk over the elements of all tensors.
// The definition (kernel.py, codes.py, rules/) says what each function computes, and is compared at first use.
//
// step_cpp.py appends what one library holds: for the storage `word` and the rule AdamW
//     struct Row : Storage<BFloat16, Tail<BFloat16, 8, 8, 0, Share{0, 0}>, Window<…>, Window<…>> { … };
//     EXPORT_STEP(Row, AdamW)
// An element of 1 or 2 bytes stands at the top of its 32-bit lane: so a bfloat16 is its float32.
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
typedef VECTOR(int16_t, 4 * LANES) Halves;
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
// a * b + c where the product is exact: fused or not, the result is the same.
INLINE Floats fused(Floats a, Floats b, Floats c) {
  return BY_LANES(AVX512(vfmaddps, a, b, c, -1, 4), AVX2(vfmaddps, a, b, c), (a * b + c));
}
INLINE Ints where_negative(Ints x, Ints a, Ints b) {
  return BY_LANES((x < 0 ? a : b), (Ints)AVX2(blendvps, (Floats)b, (Floats)a, (Floats)x), (x < 0 ? a : b));
}
// By the upper 16 bits of each lane: most processors compare 16-bit words faster.
INLINE Ints upper_equal(Ints x, Ints y) {
  return BY_LANES(((x & UPPER) == y), (Ints)((Halves)x == (Halves)y), (Ints)((Halves)x == (Halves)y));
}
INLINE Ints upper_where(Ints c, Ints a, Ints b) {
  const auto halves = [&] { return (Ints)((Halves)c ? (Halves)a : (Halves)b); };
  return BY_LANES((c ? a : b), halves(), halves());
}

// ── loads and stores of elements of 1, 2 or 4 bytes ──────────────────────────────────────────────
// A load puts elements at the top of their lanes. A store writes the bytes of each lane from a bit on.
// With PAIRED the two vectors of a group are its even and its odd elements: then 16-bit elements need
// a shift and a mask. It pays where no stream has 4 bytes.

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
// Move the elements first, first + step, … of 16 bytes to the tops of the eight lanes.
template <int BYTES> constexpr Bytes to_lanes(int first, int step) {
  Bytes places;
  for (int j = 0; j < 32; j++) {
    const int byte = j % 4 - (4 - BYTES);
    places[j] = byte < 0 ? NO_BYTE : (first + step * (j / 4)) * BYTES + byte;
  }
  return places;
}
// Move one byte of each lane, from a bit on, to the places first, first + step, … of its half.
constexpr Bytes from_lanes(int bit, int first, int step) {
  Bytes places;
  for (int j = 0; j < 32; j++) {
    const int lane = (j % 16 - first) / step;
    const bool is_used = lane >= 0 && lane < 4 && lane * step + first == j % 16;
    places[j] = is_used ? 4 * lane + bit / 8 : NO_BYTE;
  }
  return places;
}
#endif

template <int BYTES, bool PAIRED> INLINE Group load(const char* p) {
  if constexpr (PAIRED && BYTES == 4) {  // a gradient in float32
    Group x;
    for (int k = 0; k < LANES; k++) {
      x.a[k] = at_address<int32_t>(p + 8 * k);
      x.b[k] = at_address<int32_t>(p + 8 * k + 4);
    }
    return x;
  }
  if constexpr (BYTES == 4) return {at_address<Ints>(p), at_address<Ints>(p + 4 * LANES)};
  if constexpr (PAIRED && BYTES == 2) {
    const Ints words = at_address<Ints>(p);
    return {words << 16, words & UPPER};
  }
#if defined(__clang__) || LANES != 8
  if constexpr (PAIRED) {
    const Ints words = widened<2>(p);
    return {words << 24, words << 16 & (int32_t)0xFF000000};
  }
  const int up = 32 - 8 * BYTES;
  return {widened<BYTES>(p) << up, widened<BYTES>(p + BYTES * LANES) << up};
#else
  if constexpr (BYTES == 2) {
    const Bytes places = to_lanes<2>(0, 1);
    return {shuffled(loaded_twice(p), places), shuffled(loaded_twice(p + 16), places)};
  }
  const Longs4 bytes = loaded_twice(p);
  if constexpr (PAIRED) return {shuffled(bytes, to_lanes<1>(0, 2)), shuffled(bytes, to_lanes<1>(1, 2))};
  return {shuffled(bytes, to_lanes<1>(0, 1)), shuffled(bytes, to_lanes<1>(8, 1))};
#endif
}

template <int BYTES, bool PAIRED, int BIT = 32 - 8 * BYTES> INLINE void store(char* p, Group x) {
  if constexpr (BYTES == 4) {
    put(p, x.a);
    put(p + 4 * LANES, x.b);
    return;
  }
  if constexpr (PAIRED && BYTES == 2) {
    if constexpr (BIT == 16) put(p, shifted_down(x.a, 16) | (x.b & UPPER));
    else put(p, (shifted_down(x.a, BIT) & 0xFFFF) | moved(x.b, 16 - BIT) & UPPER);
    return;
  }
#if defined(__clang__) || LANES != 8
  if constexpr (PAIRED) {
    narrowed<2>(p, (shifted_down(x.a, BIT) & 0xFF) | (moved(x.b, 8 - BIT) & 0xFF00));
  } else {
    narrowed<BYTES>(p, shifted_down(x.a, BIT));
    narrowed<BYTES>(p + BYTES * LANES, shifted_down(x.b, BIT));
  }
#else
  if constexpr (BYTES == 2) {
    const Ints a = BIT == 16 ? shifted_down(x.a, 16) : shifted_down(x.a, BIT) & 0xFFFF;
    const Ints b = BIT == 16 ? shifted_down(x.b, 16) : shifted_down(x.b, BIT) & 0xFFFF;
    put(p, __builtin_ia32_permdi256((Longs4)__builtin_ia32_packusdw256(a, b), 0xD8));
    return;
  }
  constexpr int step = 1 + PAIRED, next = PAIRED ? 1 : 4;
  const Ints a = shuffled((Longs4)x.a, from_lanes(BIT, 0, step));
  const Ints both = a | shuffled((Longs4)x.b, from_lanes(BIT, next, step));
  const Longs4 joined = PAIRED ? __builtin_ia32_permdi256((Longs4)both, 0x08)
                               : (Longs4)__builtin_ia32_permvarsi256(both, (Ints){0, 4, 1, 5});
  put(p, __builtin_ia32_extract128i256(joined, 0));
#endif
}

// Fetch what a later group reads: the processor's own prefetch leaves a loop of many streams waiting.
template <int BYTES> INLINE void prefetch(const char* p) {
  for (int k = 0; k < BYTES * GROUP; k += 64) __builtin_prefetch(p + 512 + k);
}

// ── rounding ─────────────────────────────────────────────────────────────────────────────────────

// Bits of a float, with one NaN, which has neither sign nor payload.
INLINE Ints quiet(Floats x) { return where(x != x, 0x7FC00000, int_of(x)); }
// Add what rounds the lowest bits to nearest, ties to even. They stay until they are cut.
template <int DROP> INLINE Ints rounded(Ints x) {
  if constexpr (DROP == 0) return x;
  else return x + ((1 << DROP >> 1) - 1 + ((x >> DROP) & 1));
}
template <int DROP> INLINE Ints cut(Ints x) { return x & -(1 << DROP); }

INLINE Ints random_bits(Ints key, int32_t seed) {
  Ints h = (key ^ seed) * 0x7FEB352D;
  h = (h ^ shifted_down(h, 15)) * (int32_t)0x846CA68B;
  return h ^ shifted_down(h, 16);
}
// The random bits of a code, from `start` on, of the word turned up by `borrowed` bits; -1: none.
struct Share {
  int start = -1, borrowed = 0;
};
// Add random bits below the bits that stay, or what rounds to nearest.
template <int DROP, Share SHARE> INLINE Ints dithered(Ints x, Ints random) {
  if constexpr (SHARE.start < 0) return rounded<DROP>(x);
  if constexpr (SHARE.borrowed) {
    random = random << SHARE.borrowed | shifted_down(random, 32 - SHARE.borrowed);
  }
  if constexpr (SHARE.start + DROP == 32) return x + shifted_down(random, SHARE.start);
  return x + (random >> SHARE.start & ((1 << DROP) - 1));
}

// ── visible formats: words of a weight or a gradient, and bits as of a float32 ────────────────────
// BELOW is the number of mantissa bits of a float32 that the format lacks, NUMBER the format's in a table.

struct BFloat16 {
  static constexpr int NUMBER = 0, BYTES = 2, BELOW = 16;
  INLINE Ints bits(Ints word) { return word; }
  INLINE Ints word(Ints bits) { return bits; }
  INLINE Floats value(Ints bits) { return float_of(bits); }
  INLINE Floats gradient(Ints word) { return float_of(word); }
  INLINE Floats scaled(Floats x) { return x; }
  INLINE Ints in_range(Ints bits) { return bits; }
  INLINE Ints mantissa(Floats gradient) { return int_of(gradient) >> 16 & 0x7F; }
};
struct Float32 : BFloat16 {
  static constexpr int NUMBER = 2, BYTES = 4, BELOW = 0;
  INLINE Ints mantissa(Floats gradient) { return int_of(gradient) & MANTISSA; }
};
// The bits of a float16 are those of its value times 2^-112 as a float32.
struct Float16 {
  static constexpr int NUMBER = 1, BYTES = 2, BELOW = 13, END = 31 << 23;
  INLINE Ints bits(Ints word) { return shifted_down(word & 0x7FFF0000, 3) | (word & SIGN_BIT); }
  INLINE Ints word(Ints bits) { return (bits << 3 & 0x7FFF0000) | (bits & SIGN_BIT); }
  INLINE Floats value(Ints bits) { return float_of(bits) * power(112); }
  INLINE Floats gradient(Ints word) {
    const Ints x = bits(word);
    return where((x & MAGNITUDE) >= END, float_of(x | EXPONENT), value(x));
  }
  INLINE Floats scaled(Floats x) { return x * power(-112); }
  // What rounds past the largest value becomes infinite, and so does NaN.
  INLINE Ints in_range(Ints bits) { return smaller(bits & MAGNITUDE, END) | (bits & SIGN_BIT); }
  INLINE Ints mantissa(Floats gradient) { return int_of(scaled(gradient)) & MANTISSA; }
};

// ── codes of states: two functions of a lane ─────────────────────────────────────────────────────

// Of a block: a power of two that takes its values below 1, and back.
struct Scale { float into = 1, back = 1; };
struct Scales { Scale first, second; };
// A decoded state that is a product by a power of two. It is exact, so that it may be fused.
struct Product { Floats x, by; };
INLINE Floats value_of(Floats x) { return x; }
INLINE Floats value_of(Product p) { return p.x * p.by; }

enum { SIGNED = 1, HELD = 2, SCALED = 4 };

// The upper bits of a float32, to nearest, in a plane of its own. With 23 mantissa bits: all.
template <int M> struct Upper {
  static constexpr int DROP = 23 - M;
  static constexpr bool IS_SCALED = false, IS_RANDOM = false;
  INLINE Floats decode(Ints lane, const Scale&) { return float_of(lane); }
  INLINE Ints encode(Floats x, Ints, const Scale&) { return rounded<DROP>(quiet(x)); }
  INLINE Ints toward_zero(Floats x) { return quiet(x); }
};
// A small float of E exponent and M mantissa bits from BIT on, whose smallest normal value is
// 2^LOWEST. It has subnormals. Larger values and NaN become the largest. HELD: what is not zero stays
// so. SCALED: below the power of two that ends its block.
template <int E, int M, int LOWEST, int KIND, int BIT, Share SHARE> struct Window {
  static constexpr int DROP = 23 - M, UP = LOWEST + 126, LAST = ((1 << (E + M)) - 1) << DROP;
  static constexpr int SIGN_PLACE = BIT + E + M;
  static constexpr bool IS_SIGNED = KIND & SIGNED, IS_SCALED = KIND & SCALED, IS_RANDOM = SHARE.start >= 0;
  // The least value of a block, at the least scale, is a float32.
  static constexpr bool IS_EXACT = !IS_SCALED || LOWEST - M - 112 >= -149;

  INLINE auto decode(Ints lane, const Scale& scale) {
    const bool has_sign = IS_SIGNED && SIGN_PLACE == 31;  // in its place
    Ints bits = moved(lane, DROP - BIT) & (has_sign ? LAST | SIGN_BIT : LAST);
    if constexpr (IS_SIGNED && SIGN_PLACE < 31) bits |= lane << (31 - SIGN_PLACE) & SIGN_BIT;
    const Floats x = float_of(bits);
    if constexpr (!IS_SCALED) return Product{x, splat(power(UP))};
    else if constexpr (IS_EXACT) return Product{x * power(UP), splat(scale.back)};
    else return x * power(UP) * scale.back;
  }
  // Random bits that are 0 round toward zero.
  INLINE Ints toward_zero(Floats x) {
    return Window<E, M, LOWEST, KIND, BIT, Share{0}>::encode(x, Ints{}, Scale{});
  }
  INLINE Ints encode(Floats x, Ints random, const Scale& scale) {
    const Ints bits = int_of((IS_SCALED ? x * scale.into : x) * power(-UP));
    Ints code = dithered<DROP, SHARE>(smaller(bits & MAGNITUDE, LAST), random) >> DROP;
    if constexpr (KIND & HELD) code = larger(code, smaller(int_of(x), 1));
    code = code << BIT;
    if constexpr (!IS_SIGNED) return code;
    const Ints sign = bits & (bits + MANTISSA);  // a NaN loses its sign: the sum carries into it
    if constexpr (SIGN_PLACE == 31) return code | (sign & SIGN_BIT);
    else return code | (sign >> (31 - SIGN_PLACE) & 1 << SIGN_PLACE);
  }
};
struct Nothing : Upper<23> {  // of a rule without this state
  INLINE Floats decode(Ints, const Scale&) { return Floats{}; }
};

// ── Collage: a narrow number is a float32 without its DROP lowest bits, a pair an exact sum of two ─

struct Pair { Floats high, low; };
template <int DROP> INLINE Floats narrow(Floats x) { return float_of(cut<DROP>(rounded<DROP>(int_of(x)))); }
// Of a sum: the rounded one and its error. The exponent of a is not below b's.
template <int DROP> INLINE Pair fast_two_sum(Floats a, Floats b) {
  const Floats sum = narrow<DROP>(a + b);
  return {sum, b - (sum - a)};
}
template <int DROP> INLINE Pair grow(Pair x, Floats a) {
  const Floats sum = narrow<DROP>(x.high + a), of_a = sum - x.high;
  const Floats error = (x.high - (sum - of_a)) + (a - of_a);
  return fast_two_sum<DROP>(sum, narrow<DROP>(x.low + error));
}
template <int DROP> INLINE Pair product(Pair x, Pair y) {
  const Floats exact = x.high * y.high, high = narrow<DROP>(exact), error = narrow<DROP>(exact - high);
  const Floats crossed = narrow<DROP>(narrow<DROP>(x.low * y.high) + x.high * y.low);
  return fast_two_sum<DROP>(high, narrow<DROP>(crossed + error));
}

// ── weights: what lies beside the visible one ────────────────────────────────────────────────────
// read returns the weight of the rule, and a low part that is added to its change. write adds the
// change. STORED_FROM is the bit from which a plane of its own is stored, or -1.

// An infinite weight, or NaN, stays. A rule would turn its decay into NaN.
INLINE Floats finite_or_zero(Floats w) { return float_of(int_of(w) & ((int_of(w) & MAGNITUDE) < EXPONENT)); }
struct Whole {  // fills its lane
  static constexpr int STORED_FROM = -1;
  static constexpr bool HAS_LOW = false, IS_RANDOM = false;
  INLINE Ints take(Ints lane) { return lane; }
  INLINE Ints place(Ints x) { return x; }
};
// No more than the visible weight, to nearest or by chance.
template <class V, Share SHARE> struct Alone : Whole {
  static constexpr bool IS_RANDOM = SHARE.start >= 0;
  INLINE Floats read(Ints seen, Ints, Floats&) { return V::value(seen); }
  INLINE void write(Floats weight, Floats, Floats change, Ints random, Ints& seen, Ints&) {
    const Ints x = quiet(V::scaled(weight + change));
    seen = V::in_range(cut<V::BELOW>(dithered<V::BELOW, SHARE>(x, random)));
  }
};
// The signed rest of BITS bits from BIT on. DROP bits below are dropped by chance.
template <class V, int BITS, int DROP, int BIT, Share SHARE> struct Tail {
  static constexpr int HALF = 1 << V::BELOW >> 1, STORED_FROM = V::BELOW == 16 ? DROP : -1;
  static constexpr bool HAS_LOW = false, IS_RANDOM = SHARE.start >= 0;
  INLINE Ints take(Ints lane) { return moved(lane, 32 - BITS - BIT) >> (32 - BITS - DROP); }
  INLINE Ints place(Ints tail) { return moved(tail, BIT - DROP) & ((1 << BITS) - 1) << BIT; }
  // A weight that other code wrote moves by half an ulp at most, and a zero does not change its sign.
  INLINE Floats read(Ints seen, Ints tail, Floats&) {
    const Ints sum = seen + tail;
    return V::value(where_negative(sum ^ seen, seen, sum));
  }
  INLINE void write(Floats weight, Floats, Floats change, Ints random, Ints& seen, Ints& tail) {
    const Ints x = dithered<DROP, SHARE>(quiet(V::scaled(weight + change)), random);
    if constexpr (V::BELOW == 16) {  // stores cut both: the low bits of x are the tail
      seen = x + HALF;
      tail = x;
    } else {
      seen = V::in_range(cut<V::BELOW>(x + HALF));
      tail = x - seen;
    }
  }
};
// A float32 that rounds to the visible weight. If it does not, other code wrote that.
template <class V> struct Master : Whole {
  static constexpr int HALF = 1 << V::BELOW >> 1;
  INLINE Ints visible(Floats x) { return V::in_range(cut<V::BELOW>(quiet(V::scaled(x)) + HALF)); }
  INLINE Floats read(Ints seen, Ints master, Floats&) {
    const Floats stored = float_of(master);
    return where(visible(stored) == V::in_range(seen), stored, V::value(seen));
  }
  INLINE void write(Floats weight, Floats, Floats change, Ints, Ints& seen, Ints& master) {
    const Floats x = weight + change;
    seen = visible(x);
    master = quiet(x);
  }
};
// A second part in a code of 16 bits. It belongs to the weight if their sum rounds to it.
template <class V, class Low> struct InTwoParts : Whole {
  static constexpr bool HAS_LOW = true;
  INLINE Ints belongs(Ints seen, Floats low) {  // in the upper half of each lane
    const Ints sum = rounded<V::BELOW>(int_of(V::scaled(V::value(seen) + low)));
    if constexpr (V::BELOW == 16) return upper_equal(sum, seen);
    else return cut<V::BELOW>(sum) == seen;
  }
  INLINE Floats read(Ints seen, Ints lane, Floats& low) {
    low = value_of(Low::decode(lane, Scale{}));
    low = float_of(belongs(seen, low) & int_of(low));
    return V::value(seen);
  }
  // To nearest, or toward zero where the nearest one does not belong.
  INLINE Ints encode(Ints seen, Floats rest) {
    const Ints nearest = cut<16>(Low::encode(rest, Ints{}, Scale{}));
    const Ints is_own = belongs(seen, value_of(Low::decode(nearest, Scale{})));
    return upper_where(is_own, nearest, Low::toward_zero(rest));
  }
};
// Kahan's: what the weight did not absorb is added to the next change.
template <class V, class Low> struct Compensated : InTwoParts<V, Low> {
  INLINE void write(Floats weight, Floats low, Floats change, Ints, Ints& seen, Ints& lane) {
    const Floats total = low + change;
    seen = cut<V::BELOW>(rounded<V::BELOW>(quiet(weight + total)));
    lane = InTwoParts<V, Low>::encode(seen, total - (V::value(seen) - weight));
  }
};
// Collage's: a pair grows by the change. An infinite one, or NaN, stays, without a second part.
template <class V, class Low> struct Grown : InTwoParts<V, Low> {
  INLINE void write(Floats weight, Floats low, Floats change, Ints, Ints& seen, Ints& lane) {
    const Pair grown = grow<V::BELOW>({finite_or_zero(weight), low}, change);
    const Ints stays = (int_of(weight) & MAGNITUDE) >= EXPONENT;
    const Ints bits = quiet(V::scaled(where(stays, weight, grown.high)));
    seen = V::in_range(cut<V::BELOW>(rounded<V::BELOW>(bits)));
    lane = InTwoParts<V, Low>::encode(seen, where(stays, 0.0f, grown.low));
  }
};

// ── rules ────────────────────────────────────────────────────────────────────────────────────────
// begin computes the new states, and returns what must wait for a square root or a division. change
// ends the step. Scalars are those of the Python rule, in its order. PENALIZED: states depend on the
// weight. GIVEN: a matrix rule, whose change is a stream.

struct Moments { Floats first, second; };
struct Parts : Moments { Floats rest; };  // the second part of the second moment, old and new
// An average moved by a share. LESS: no share is 1, which would give the value itself.
template <bool LESS> INLINE Floats toward(Floats old, Floats x, float share) {
  return LESS || share != 1 ? old + (x - old) * share : x;
}
template <bool LESS> INLINE Floats toward(Product old, Floats x, float share) {
  return LESS || share != 1 ? fused(old.x, old.by, fused(-old.x, old.by, x) * share) : x;
}
// The square of a finite gradient may be infinite. Such a weight is frozen, as torch's. Windows end.
INLINE Floats unless_frozen(Floats old, Floats next) { return where(old < INFINITE, next, old); }
INLINE Floats unless_frozen(Product, Floats next) { return next; }

template <int NUM_STATES, bool IS_PENALIZED = false, bool IS_GIVEN = false> struct Rule {
  typedef Moments Next;
  static constexpr int STATES = NUM_STATES;
  static constexpr bool PENALIZED = IS_PENALIZED, GIVEN = IS_GIVEN;
};
#define BEGIN                               \
  template <bool LESS, class A, class B>    \
  INLINE Floats begin(Floats w, Floats g, A old_m, B old_v, Moments& next, const Scalars& s)
#define CHANGE INLINE Floats change(Floats w, Floats waits, Floats m, const Scalars& s)
#define IS_LESS INLINE bool is_less(const Scalars& s)

struct AdamScalars {
  float one_minus_beta1, one_minus_beta2, negative_step_size, inverse_root_correction2, eps;
};
template <bool LESS, class A, class B>
INLINE Floats begin_adam(Floats g, A old_m, B old_v, Moments& next, const AdamScalars& s) {
  next.first = toward<LESS>(old_m, g, s.one_minus_beta1);
  next.second = unless_frozen(old_v, toward<LESS>(old_v, g * g, s.one_minus_beta2));
  return root(next.second);
}
INLINE Floats end_adam(Floats root_v, Floats m, const AdamScalars& s) {
  return m / (root_v * s.inverse_root_correction2 + s.eps) * s.negative_step_size;
}
struct AdamW : Rule<2> {
  struct Scalars : AdamScalars { float negative_decay; };
  IS_LESS { return s.one_minus_beta1 != 1 && s.one_minus_beta2 != 1; }
  BEGIN { return begin_adam<LESS>(g, old_m, old_v, next, s); }
  CHANGE { return end_adam(waits, m, s) + s.negative_decay * w; }
};
// AdamW in narrow numbers. Blocks have the bounds of AdamW, whose `begin` takes Moments.
template <int DROP, bool IS_PAIR> struct Collage : AdamW {
  typedef Parts Next;
  using AdamW::begin;
  INLINE Floats narrow(Floats x) { return ::narrow<DROP>(x); }
  INLINE Floats average(Floats old, Floats share, Floats increment) {
    return narrow(narrow(old * (1.0f - share)) + increment);
  }
  INLINE Pair average(Pair old, Floats share, Floats increment) {
    const Floats beta = 1.0f - share, high = narrow(beta);
    return grow<DROP>(product<DROP>(old, {high, narrow(beta - high)}), narrow(increment));
  }
  template <bool LESS, class A, class B>
  INLINE Floats begin(Floats, Floats g, A old_m, B old_v, Parts& next, const Scalars& s) {
    g = narrow(float_of(quiet(g)));
    const Floats share1 = splat(s.one_minus_beta1), share2 = splat(s.one_minus_beta2);
    next.first = average(value_of(old_m), share1, share1 * g);
    if constexpr (IS_PAIR) {
      const Pair second = average(Pair{value_of(old_v), next.rest}, share2, share2 * g * g);
      next.rest = second.low;
      next.second = second.high;
    } else {
      next.second = average(value_of(old_v), share2, share2 * g * g);
    }
    return root(next.second);
  }
  CHANGE {
    const Floats root_v = narrow(narrow(waits) * s.inverse_root_correction2);
    const Floats step = narrow(narrow(m * s.negative_step_size) / narrow(root_v + s.eps));
    return narrow(step + narrow(w * s.negative_decay));
  }
};
struct Adam : Rule<2, true> {
  struct Scalars : AdamScalars { float weight_decay; };
  IS_LESS { return s.one_minus_beta1 != 1 && s.one_minus_beta2 != 1; }
  BEGIN { return begin_adam<LESS>(g + w * s.weight_decay, old_m, old_v, next, s); }
  CHANGE { return end_adam(waits, m, s); }
};
struct SGD : Rule<1, true> {
  struct Scalars {
    float weight_decay, momentum, gain, share_of_gradient, share_of_momentum, negative_lr;
  };
  IS_LESS { return true; }
  BEGIN {
    g = g + w * s.weight_decay;
    next.first = value_of(old_m) * s.momentum + g * s.gain;
    return g;
  }
  CHANGE { return (waits * s.share_of_gradient + m * s.share_of_momentum) * s.negative_lr; }
};
struct PlainSGD : Rule<0, true> {
  struct Scalars { float weight_decay, negative_lr; };
  IS_LESS { return true; }
  BEGIN { return g + w * s.weight_decay; }
  CHANGE { return waits * s.negative_lr; }
};
struct Lion : Rule<1> {
  struct Scalars { float one_minus_beta1, one_minus_beta2, negative_lr, negative_decay; };
  IS_LESS { return s.one_minus_beta1 != 1 && s.one_minus_beta2 != 1; }
  BEGIN {
    const Floats direction = toward<LESS>(old_m, g, s.one_minus_beta1);
    next.first = toward<LESS>(old_m, g, s.one_minus_beta2);
    return where(direction > 0, 1.0f, where(direction < 0, -1.0f, 0.0f));
  }
  CHANGE { return waits * s.negative_lr + w * s.negative_decay; }
};
struct Muon : Rule<1, false, true> {
  struct Scalars { float negative_decay, momentum, one_minus_momentum, nesterov; };
  IS_LESS { return s.one_minus_momentum != 1; }
  BEGIN { return next.first = toward<LESS>(old_m, g, s.one_minus_momentum); }
  CHANGE { return waits + w * s.negative_decay; }
};
// A matrix rule whose states have shapes of their own: only the decay is left.
struct Given : Rule<0, false, true> {
  struct Scalars { float negative_decay; };
  IS_LESS { return true; }
  BEGIN { return g; }
  CHANGE { return waits + w * s.negative_decay; }
};

// ── storages: a visible format, a weight, codes of states, and the planes of their fields ─────────
// step_cpp.py writes one as a struct Row with the types V, W, First, Second, Rest, and a LAYOUT.

struct Layout {
  int planes = 0, bytes[4] = {};
  int low = -1, first = -1, second = -1, rest = -1;  // planes
};

// ── one lane ─────────────────────────────────────────────────────────────────────────────────────

template <class R> struct Numbers {
  float gradient_scale;
  typename R::Scalars rule;
  int32_t seed;
};
struct Lane {
  Ints seen, plane[4];
  Floats gradient, given;
};
struct Written { Ints seen, plane[4]; };
template <class S, class R> struct Step {
  typedef typename S::V V;
  typedef typename S::W W;
  typedef typename S::First First;
  typedef typename S::Second Second;
  typedef typename S::Rest Rest;
  static constexpr Layout L = S::LAYOUT;
  static constexpr bool IS_SCALED = First::IS_SCALED || Second::IS_SCALED;
  struct Waiting {
    Ints random;
    Floats weight, low, waits;
    typename R::Next next;
  };
  static constexpr bool IS_RANDOM = W::IS_RANDOM || First::IS_RANDOM || Second::IS_RANDOM;
  static constexpr bool IS_CUT_BY_STORE = W::STORED_FROM >= 0 && L.low != L.first;
  static constexpr int stored_from(int plane) {
    return IS_CUT_BY_STORE && plane == L.low ? W::STORED_FROM : 32 - 8 * L.bytes[plane];
  }
  INLINE Ints lane_of(const Lane& x, int plane) { return plane < 0 ? Ints{} : x.plane[plane]; }

  template <bool LESS> INLINE Waiting begin(const Lane& x, const Numbers<R>& n, const Scales& scales) {
    Waiting y;
    y.weight = W::read(x.seen, W::take(lane_of(x, L.low)), y.low);
    const auto m = First::decode(lane_of(x, L.first), scales.first);
    const auto v = Second::decode(lane_of(x, L.second), scales.second);
    if constexpr (L.rest >= 0) y.next.rest = value_of(Rest::decode(x.plane[L.rest], scales.second));
    y.random = Ints{};
    if (IS_RANDOM) y.random = random_bits(int_of(y.weight) ^ V::mantissa(x.gradient), n.seed);
    const Floats w = finite_or_zero(y.weight), g = x.gradient * n.gradient_scale;
    y.waits = R::template begin<LESS>(w, g, m, v, y.next, n.rule);
    if constexpr (R::GIVEN) {
      const Floats weight = W::HAS_LOW ? y.weight + y.low : y.weight;
      y.waits = R::change(finite_or_zero(weight), x.given, Floats{}, n.rule);
    } else if constexpr (W::HAS_LOW) {
      y.waits = R::change(w, y.waits, y.next.first, n.rule);
    }
    return y;
  }
  INLINE Written end(const Waiting& x, const Numbers<R>& n, const Scales& scales) {
    Written y{};
    Ints low;
    Floats change = x.waits;
    if constexpr (!R::GIVEN && !W::HAS_LOW)
      change = R::change(finite_or_zero(x.weight), x.waits, x.next.first, n.rule);
    W::write(x.weight, x.low, change, x.random, y.seen, low);
    if constexpr (L.low >= 0) y.plane[L.low] = IS_CUT_BY_STORE ? low : W::place(low);
    if constexpr (L.first >= 0) y.plane[L.first] |= First::encode(x.next.first, x.random, scales.first);
    if constexpr (L.second >= 0) y.plane[L.second] |= Second::encode(x.next.second, x.random, scales.second);
    if constexpr (L.rest >= 0) y.plane[L.rest] |= Rest::encode(x.next.rest, x.random, scales.second);
    return y;
  }
};

// ── the walk: a group begins while the one before it, which waits for a square root, ends ────────

template <class S, class R> struct Walk {
  typedef ::Step<S, R> Step;
  typedef typename S::V V;
  static constexpr Layout L = Step::L;
  static constexpr int STREAMS = 2 + L.planes + R::GIVEN;  // weight, gradient, planes, and the change
  static constexpr bool is_paired() {
    for (int k = 0; k < L.planes; k++)
      if (L.bytes[k] == 4) return false;
    return V::BYTES == 2 && !R::GIVEN;
  }
  static constexpr bool PAIRED = is_paired();
  struct Lanes { Lane a, b; };
  INLINE int size_of(int stream, bool wide) {
    if (stream == 0) return V::BYTES;
    if (stream == 1) return wide ? 4 : V::BYTES;
    return stream < 2 + L.planes ? L.bytes[stream - 2] : 4;
  }
  template <int BYTES> INLINE Group fetch(const char* stream, int64_t at) {
    prefetch<BYTES>(stream + BYTES * at);
    return load<BYTES, PAIRED>(stream + BYTES * at);
  }
  template <int K = 0> INLINE void load_planes(char* const* p, int64_t at, Lanes& x) {
    if constexpr (K < L.planes) {
      const Group words = fetch<L.bytes[K]>(p[2 + K], at);
      x.a.plane[K] = words.a;
      x.b.plane[K] = words.b;
      load_planes<K + 1>(p, at, x);
    }
  }
  template <bool WIDE> INLINE Lanes load_lanes(char* const* p, int64_t at) {
    Lanes x;
    const Group weight = fetch<V::BYTES>(p[0], at), gradient = fetch<WIDE ? 4 : V::BYTES>(p[1], at);
    x.a.seen = V::bits(weight.a);
    x.b.seen = V::bits(weight.b);
    x.a.gradient = WIDE ? float_of(gradient.a) : V::gradient(gradient.a);
    x.b.gradient = WIDE ? float_of(gradient.b) : V::gradient(gradient.b);
    load_planes(p, at, x);
    if constexpr (R::GIVEN) {
      const Group given = fetch<4>(p[STREAMS - 1], at);
      x.a.given = float_of(given.a);
      x.b.given = float_of(given.b);
    }
    return x;
  }
  template <int K = 0>
  INLINE void store_planes(char* const* p, int64_t at, const Written& x, const Written& y) {
    if constexpr (K < L.planes) {
      char* const place = p[2 + K] + L.bytes[K] * at;
      store<L.bytes[K], PAIRED, Step::stored_from(K)>(place, {x.plane[K], y.plane[K]});
      store_planes<K + 1>(p, at, x, y);
    }
  }
  // Step groups, so many with the scales of each block.
  template <bool LESS, bool WIDE>
  APART void step_groups(char* const* streams, int64_t count, const Numbers<R>& numbers, const Scales* scales,
                         int64_t groups_of_block) {
    const Numbers<R> n = numbers;  // copies, which no store changes
    char* p[STREAMS];
    for (int k = 0; k < STREAMS; k++) p[k] = streams[k];
    typename Step::Waiting a, b, next_a, next_b;
    const auto begin = [&](int64_t at, const Scales& block) ALWAYS {
      const Lanes x = load_lanes<WIDE>(p, at);
      next_a = Step::template begin<LESS>(x.a, n, block);
      next_b = Step::template begin<LESS>(x.b, n, block);
    };
    const auto end = [&](int64_t at, const Scales& block) ALWAYS {
      const Written x = Step::end(a, n, block), y = Step::end(b, n, block);
      store<V::BYTES, PAIRED>(p[0] + V::BYTES * at, {V::word(x.seen), V::word(y.seen)});
      store_planes(p, at, x, y);
    };
    begin(0, *scales);
    for (int64_t at = 0, last = groups_of_block;; last += groups_of_block) {
      const Scales block = *scales++;
      a = next_a, b = next_b;
      const int64_t stop = GROUP * ((last < count ? last : count) - 1);
      for (; at < stop; at += GROUP) {
        begin(at + GROUP, block);
        end(at, block);
        a = next_a, b = next_b;
      }
      if (last >= count) return end(at, block);
      begin(at + GROUP, *scales);
      end(at, block);
      at += GROUP;
    }
  }
  INLINE void step(char* const* p, int64_t count, bool wide, const Numbers<R>& n, const Scales* s, int64_t of_block) {
    const bool is_less = R::is_less(n.rule);
    if (wide) {
      is_less ? step_groups<true, true>(p, count, n, s, of_block) : step_groups<false, true>(p, count, n, s, of_block);
    } else if constexpr (V::BYTES == 2) {
      is_less ? step_groups<true, false>(p, count, n, s, of_block) : step_groups<false, false>(p, count, n, s, of_block);
    }
  }
  // Step elements in blocks of a width, the first of which has the first scales: whole groups, and the
  // rest in a copy padded with zeros.
  INLINE void step_all(char* const* p, int64_t count, bool wide, const Numbers<R>& n, const Scales* s, int64_t width) {
    const int64_t at = count / GROUP * GROUP, left = count - at, of_block = width < GROUP ? 1 : width / GROUP;
    if (at) step(p, count / GROUP, wide, n, s, of_block);
    if (!left) return;
    alignas(64) char copy[STREAMS][4 * GROUP] = {};
    char* q[STREAMS];
    for (int k = 0; k < STREAMS; k++) {
      const int64_t size = size_of(k, wide);
      q[k] = (char*)memcpy(copy[k], p[k] + size * at, size * left);
    }
    step(q, 1, wide, n, s + at / width, of_block);
    for (int k = 0; k < STREAMS; k++) {
      const int64_t size = size_of(k, wide);
      if (k != 1) memcpy(p[k] + size * at, q[k], size * left);
    }
  }
};

// ── blocks with scales: a rule's step of the largest magnitudes of a block bounds its new states ──

// Of floats of 16 or 32 bits, read as integers, in which a NaN is the largest. Leave out what is above end.
template <class T> APART T largest_magnitude(const char* p, int64_t count, T end) {
  constexpr T ALL = (T)((uint64_t)-1 >> (65 - 8 * sizeof(T)));
  T largest = 0;
  for (int64_t at = 0; at < count; at++) {
    T x = at_address<T>(p + sizeof(T) * at) & ALL;
    x = x <= end ? x : 0;
    largest = x > largest ? x : largest;
  }
  return largest;
}
// As a word at the top of a lane.
template <class V> INLINE int32_t peak_of(const char* p, int64_t count, bool wide, bool is_finite = false) {
  if (wide || V::BYTES == 4) return largest_magnitude<int32_t>(p, count, is_finite ? EXPONENT - 1 : MAGNITUDE);
  const int16_t end = !is_finite ? INT16_MAX : V::BELOW == 16 ? 0x7F7F : 0x7BFF;
  return (int32_t)largest_magnitude<int16_t>(p, count, end) << 16;
}

INLINE Floats finite(Floats bound) { return where(bound < INFINITE, bound, 3e38f); }
// A bound grows by 2^20 at most: one huge gradient costs its element, not its block. That of a block without
// gradients stays, or the next gradient would be huge to it.
INLINE Floats limited(Floats bound, Floats old, Ints is_idle) {
  const Floats most = finite(bound), grown = old * 0x1p20f;
  const Floats moving = where((old > 0) & (grown < most), grown, most);
  return where(is_idle, where(old > most, old, most), moving);
}
// The power of two not below a bound, or its inverse.
INLINE Floats end_of(Floats bound, int sign) {
  const Ints exponent = ((int_of(finite(bound)) + MANTISSA) >> 23) - 127;
  return float_of((127 + sign * smaller(larger(exponent, -112), 126)) << 23);
}
INLINE Floats larger_magnitude(Floats x, Floats y) {
  return float_of(larger(int_of(x) & MAGNITUDE, int_of(y) & MAGNITUDE));
}
// Each lane is a block.
template <class R> INLINE Moments new_bounds(Floats gradient, Floats w, Moments old, const Numbers<R>& n) {
  const Floats g = gradient * float_of(int_of(n.gradient_scale) & MAGNITUDE);
  Moments plus{}, minus{}, added{};
  R::template begin<false>(w, g, old.first, old.second, plus, n.rule);
  R::template begin<false>(w, -1.0f * g, old.first, old.second, minus, n.rule);
  R::template begin<false>(w, g, Floats{}, Floats{}, added, n.rule);
  const Floats first = larger_magnitude(plus.first, minus.first);
  const Floats second = larger_magnitude(plus.second, minus.second);
  return {limited(first, old.first, added.first == 0), limited(second, old.second, added.second == 0)};
}

// ── programs: a part of a tensor ─────────────────────────────────────────────────────────────────

constexpr int BLOCK = 256;
// A row of the table: addresses of the streams and of the bounds, then these (table.py).
struct Sizes { int64_t extent, count, first, format, aligned, number, columns; };
// So many blocks from the first one on. Without scales a tensor is one row: so many elements.
struct Program {
  const int64_t* row;
  Sizes size;
  int64_t block, blocks, begin, span;
};
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
template <int ADDRESSES> INLINE Program find(const int64_t* table, const int32_t* tiles, int64_t number) {
  Program x;
  x.row = table + tiles[number] * (ADDRESSES + sizeof x.size / 8);
  memcpy(&x.size, x.row + ADDRESSES, sizeof x.size);
  x.block = (number - x.size.first) * x.size.extent;
  x.blocks = least(x.size.count - x.block, x.size.extent);
  x.begin = x.block * BLOCK;
  x.span = least(x.size.columns - x.begin, x.blocks * BLOCK);
  return x;
}
template <class F> INLINE void in_parallel(int64_t count, int threads, F function) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t k = 0; k < count; k++) function(k);
}

template <class S, class R> struct Programs {
  typedef Walk<S, R> W;
  typedef typename S::V V;
  static constexpr int BOUNDS = W::Step::IS_SCALED ? R::STATES : 0, ADDRESSES = W::STREAMS + BOUNDS;
  static constexpr int SCALARS = sizeof(typename R::Scalars) / 4;
  struct Streams { char* p[W::STREAMS]; };
  INLINE Streams streams_at(const Program& x, bool wide, int64_t element) {
    Streams y;
    for (int k = 0; k < W::STREAMS; k++) y.p[k] = (char*)x.row[k] + W::size_of(k, wide) * element;
    return y;
  }
  // Set the bounds of some blocks from their largest magnitudes, and their scales.
  INLINE void set_bounds(const Program& x, int64_t block, int64_t count, Floats gradient, Floats weight,
                         const Numbers<R>& n, Scales* scales) {
    float* const first = (float*)x.row[W::STREAMS] + block;
    float* const second = (float*)x.row[W::STREAMS + BOUNDS - 1] + block;
    Moments old{};
    memcpy((void*)&old.first, first, 4 * count);
    if (BOUNDS > 1) memcpy((void*)&old.second, second, 4 * count);
    const Moments now = new_bounds<R>(gradient, weight, old, n);
    memcpy(first, &now.first, 4 * count);
    if (BOUNDS > 1) memcpy(second, &now.second, 4 * count);
    const Floats m_into = end_of(now.first, -1), m_back = end_of(old.first, 1);
    const Floats v_into = end_of(now.second, -1), v_back = end_of(old.second, 1);
    for (int k = 0; k < LANES; k++) scales[k] = {{m_into[k], m_back[k]}, {v_into[k], v_back[k]}};
  }
  // Step blocks, the bounds of some at a time.
  INLINE void step_blocks(const Program& x, bool wide, const Numbers<R>& n) {
    const int64_t columns = x.size.columns, of_row = (columns + BLOCK - 1) / BLOCK;
    const int64_t width = least(columns, BLOCK);
    const bool is_joined = columns % width == 0 && width % GROUP == 0;
    for (int64_t at = 0; at < x.blocks; at += LANES) {
      const int64_t count = least(x.blocks - at, LANES);
      int64_t begins[LANES], sizes[LANES];
      Ints gradients{}, weights{};
      for (int k = 0; k < count; k++) {
        const int64_t block = x.block + at + k, column = block % of_row * BLOCK;
        begins[k] = block / of_row * columns + column;
        sizes[k] = least(columns - column, BLOCK);
        const Streams y = streams_at(x, wide, begins[k]);
        gradients[k] = peak_of<V>(y.p[1], sizes[k], wide);
        if constexpr (R::PENALIZED) weights[k] = peak_of<V>(y.p[0], sizes[k], false, true);
      }
      Scales scales[LANES];
      const Floats slopes = wide ? float_of(gradients) : V::gradient(gradients);
      set_bounds(x, x.block + at, count, slopes, V::gradient(weights), n, scales);
      for (int64_t k = 0; k < count; k += is_joined ? count : 1) {
        const int64_t size = is_joined ? width * count : sizes[k];
        W::step_all(streams_at(x, wide, begins[k]).p, size, wide, n, scales + k, width);
      }
    }
  }
  INLINE void step(const int64_t* table, const int32_t* tiles, int64_t count, const float* numbers,
                   const float* control, int threads) {
    in_parallel(count, threads, [=](int64_t k) {
      const Program x = find<ADDRESSES>(table, tiles, k);
      const bool wide = x.size.format == Float32::NUMBER;
      const float* scalars = numbers + x.size.number * (SCALARS + 1);
      Numbers<R> n;
      n.gradient_scale = control[0];
      memcpy((void*)&n.rule, scalars, 4 * SCALARS);
      n.seed = int_of(scalars[SCALARS]);
      const Scales none{};
      if constexpr (BOUNDS > 0) step_blocks(x, wide, n);
      else W::step_all(streams_at(x, wide, x.begin).p, x.span, wide, n, &none, x.span);
    });
  }
};

// ── the norm of gradients: the exact sum of squares, as integers at fixed places ──────────────────
// Word k counts steps of 2^(2k - 386). The last word counts infinities, and 2^32 times NaNs.

constexpr int WORDS = 315, PIECE = 4096;
typedef VECTOR(float, 2 * LANES) HalfFloats;
typedef VECTOR(int32_t, 2 * LANES) HalfInts;
INLINE Doubles fused(Doubles a, Doubles b, Doubles c) {
  return BY_LANES(AVX512(vfmaddpd, a, b, c, -1, 4), AVX2(vfmaddpd, a, b, c), (a * b + c));
}
INLINE Doubles doubles_of(HalfInts bits) {
  const HalfFloats x = (HalfFloats)bits;
  return BY_LANES(AVX512(cvtps2pd, x, Doubles{}, -1, 4), AVX2(cvtps2pd, x), __builtin_convertvector(x, Doubles));
}
INLINE double power_of_2(int64_t exponent) { return __builtin_bit_cast(double, (exponent + 1023) << 52); }
INLINE void add_at(int64_t* word, int64_t x) { __atomic_fetch_add(word, x, __ATOMIC_RELAXED); }
// The low 32 bits to a word and the others 16 words on, so that 2^31 counts fit.
INLINE void add_count(int64_t* word, uint64_t count) {
  add_at(word, count & 0xFFFFFFFF);
  add_at(word + 16, count >> 32);
}

// Of at most 4,096 bfloat16 or float32 below 2^(top + 1). A sum with 2^(2 top + 2) is in whole steps of 2^(2 top - 50):
// its bits count them. What that rounds away is exact, and sums of it are, in steps of 2^(2 top - 92). A third grid of
// 2^(2 top - 134) is like it. All squares must be whole on the last of so many grids.
template <class T, int GRIDS> APART void add_squares(const char* p, int64_t count, int top, int64_t* words) {
  constexpr int EACH = LANES * 4 / sizeof(T);
  const Doubles shift = power_of_2(2 * top + 2) - Doubles{};
  const Doubles second = power_of_2(2 * top - 40) * 1.5 - Doubles{};
  Longs steps[2]{};
  Doubles rests[4]{}, lowest[4]{};
  const auto add = [&](HalfInts bits, int k) ALWAYS {
    const Doubles x = doubles_of(bits), sum = fused(x, x, shift);
    steps[k % 2] += (Longs)sum;
    if constexpr (GRIDS == 1) return;
    const Doubles rest = fused(x, x, shift - sum), whole = GRIDS == 2 ? rest : (rest + second) - second;
    rests[k] += whole;
    if constexpr (GRIDS == 3) lowest[k] += rest - whole;
  };
  alignas(64) char last[4 * LANES] = {};
  for (int64_t at = 0; at < count; at += EACH) {
    const char* q = p + sizeof(T) * at;
    if (at + EACH > count) q = (const char*)memcpy(last, q, sizeof(T) * (count - at));
    __builtin_prefetch(q + sizeof(T) * PIECE);
    const HalfInts a = at_address<HalfInts>(q), b = at_address<HalfInts>(q + 2 * LANES);
    if constexpr (sizeof(T) == 4) {
      add(a, 0);
      add(b, 1);
    } else {
      add(a << 16, 0);
      add(a & UPPER, 1);
      add(b << 16, 2);
      add(b & UPPER, 3);
    }
  }
  uint64_t whole = -(uint64_t)((count + EACH - 1) / EACH * EACH) * __builtin_bit_cast(uint64_t, shift[0]);
  for (int k = 0; k < LANES / 2; k++) whole += steps[0][k] + steps[1][k];
  // A grid lends 2^11 steps to the next, so that no count is negative: 2^53 steps there.
  const int64_t lent = 1 << 11;
  add_count(words + top + 168, whole - (GRIDS > 1 ? lent : 0));
  const auto add_rests = [=](const Doubles* x, int place, int64_t extra) {
    double sum = 0;
    for (int k = 0; k < LANES / 2; k++) sum += x[0][k] + x[1][k] + x[2][k] + x[3][k];
    add_count(words + place, (int64_t)(sum * power_of_2(386 - 2 * place)) + (lent << 42) - extra);
  };
  if (GRIDS > 1) add_rests(rests, top + 147, GRIDS > 2 ? lent : 0);
  if (GRIDS > 2) add_rests(lowest, top + 126, 0);
}

// The largest magnitude, and the least that is not zero, less one.
template <class T> struct Range { T largest = 0, before = -1; };
template <class T> constexpr T ALL = (T)-1 >> 1;
template <class T> APART Range<T> range_of(const char* p, int64_t count) {
  Range<T> range;
  for (int64_t at = 0; at < count; at++) {
    const T x = at_address<T>(p + sizeof(T) * at) & ALL<T>, before = x - 1;
    range.largest = x > range.largest ? x : range.largest;
    range.before = before < range.before ? before : range.before;
  }
  return range;
}
template <class T> APART void split(const char* p, int64_t count, T least, char* upper, char* lower) {
  for (int64_t at = 0; at < count; at++) {
    const T x = at_address<T>(p + sizeof(T) * at);
    const bool is_upper = (x & ALL<T>) >= least;
    put(upper + sizeof(T) * at, (T)(is_upper ? x : 0));
    put(lower + sizeof(T) * at, (T)(is_upper ? 0 : x));
  }
}
// Of at most PIECE elements. What is too far below the largest waits for a sum of its own.
template <class T> INLINE void add_piece(const char* p, int64_t count, int64_t* words) {
  constexpr int MANTISSA_BITS = 8 * sizeof(T) - 9, MOST = 25 - MANTISSA_BITS;
  alignas(64) char upper[sizeof(T) * PIECE], lower[sizeof(T) * PIECE];
  while (true) {
    const Range<T> range = range_of<T>(p, count);
    const int largest = range.largest >> MANTISSA_BITS, end = (range.before + 1) >> MANTISSA_BITS;
    if (!range.largest) return;
    if (largest == 255) {
      const bool is_nan = range.largest & ((1 << MANTISSA_BITS) - 1);
      return add_at(words + WORDS - 1, is_nan ? (int64_t)1 << 32 : 1);
    }
    const int top = largest + !largest - 127, span = top + 127 - end - !end;
    if (span <= MOST) return add_squares<T, 1>(p, count, top, words);
    if (span <= MOST + 21) return add_squares<T, 2>(p, count, top, words);
    if (span <= MOST + 42) return add_squares<T, 3>(p, count, top, words);
    split<T>(p, count, (T)((largest - MOST - 42) << MANTISSA_BITS), upper, lower);
    add_squares<T, 3>(upper, count, top, words);
    p = lower;
  }
}
INLINE void add_pieces(BFloat16, const char* p, int64_t count, int64_t* words) {
  add_piece<uint16_t>(p, count, words);
}
INLINE void add_pieces(Float32, const char* p, int64_t count, int64_t* words) {
  add_piece<uint32_t>(p, count, words);
}
INLINE void add_pieces(Float16, const char* p, int64_t count, int64_t* words) {
  alignas(64) char floats[4 * (PIECE + GROUP)], last[2 * GROUP] = {};
  for (int64_t at = 0; at < count; at += GROUP) {
    const char* q = p + 2 * at;
    if (at + GROUP > count) q = (const char*)memcpy(last, q, 2 * (count - at));
    const Group x = load<2, true>(q);
    put(floats + 4 * at, Float16::gradient(x.a));
    put(floats + 4 * (at + LANES), Float16::gradient(x.b));
  }
  add_piece<uint32_t>(floats, (count + GROUP - 1) / GROUP * GROUP, words);
}

// A row of the norm's table has two addresses, as that of a step: the second is of the gradient.
template <class F>
INLINE void over_gradients(const int64_t* table, const int32_t* tiles, int64_t count, int threads, F function) {
  in_parallel(count, threads, [=](int64_t k) {
    const Program x = find<2>(table, tiles, k);
    const char* p = (const char*)x.row[1];
    if (x.size.format == BFloat16::NUMBER) function(k, x, BFloat16{}, p + 2 * x.begin);
    else if (x.size.format == Float16::NUMBER) function(k, x, Float16{}, p + 2 * x.begin);
    else function(k, x, Float32{}, p + 4 * x.begin);
  });
}
// Each slot holds the words of a part: additions to one address wait for each other.
INLINE void sum_squares(const int64_t* table, const int32_t* tiles, int64_t count, int64_t* words, int64_t slots,
                        int threads) {
  over_gradients(table, tiles, count, threads, [=](int64_t k, const Program& x, auto format, const char* p) {
    int64_t* const slot = words + (x.size.number * slots + k % slots) * WORDS;
    for (int64_t at = 0; at < x.span; at += PIECE)
      add_pieces(format, p + decltype(format)::BYTES * at, least(x.span - at, PIECE), slot);
  });
}

// ── the sample of an audit: some elements of every tensor ────────────────────────────────────────

INLINE void gather_elements(const int64_t* addresses, const int64_t* numbers, int64_t count, const int64_t* places,
                            char* out, int bytes) {
  for (int64_t k = 0; k < count; k++)
    memcpy(out + bytes * k, (const char*)addresses[numbers[k]] + bytes * places[k], bytes);
}

// ── what a library exports: step_cpp.py appends one of these ──────────────────────────────────────

#define PROGRAMS const int64_t *table, const int32_t *tiles, int64_t count
#define EXPORT_STEP(...)                                                                           \
  extern "C" void step(PROGRAMS, const float* numbers, const float* control, int32_t threads) {    \
    Programs<__VA_ARGS__>::step(table, tiles, count, numbers, control, threads);                   \
  }                                                                                                \
  extern "C" void gather(const int64_t* addresses, const int64_t* numbers, int64_t count,          \
                         const int64_t* places, char* out, int32_t bytes) {                        \
    gather_elements(addresses, numbers, count, places, out, bytes);                                \
  }
#define EXPORT_NORM                                                                                \
  extern "C" void squares(PROGRAMS, int64_t* words, int64_t slots, int32_t threads) {              \
    sum_squares(table, tiles, count, words, slots, threads);                                       \
  }
