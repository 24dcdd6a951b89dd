// The norm of gradients: the exact sum of squares, as integers at fixed places.
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
INLINE void add_pieces(BFloat16, const char* p, int64_t count, int64_t* words) { add_piece<uint16_t>(p, count, words); }
INLINE void add_pieces(Float32, const char* p, int64_t count, int64_t* words) { add_piece<uint32_t>(p, count, words); }
INLINE void add_pieces(Float16, const char* p, int64_t count, int64_t* words) {
  alignas(64) char floats[4 * (PIECE + GROUP)], last[2 * GROUP] = {};
  for (int64_t at = 0; at < count; at += GROUP) {
    const char* q = p + 2 * at;
    if (at + GROUP > count) q = (const char*)memcpy(last, q, 2 * (count - at));
    const Group x = load<2>(q);
    put(floats + 4 * at, Float16::gradient(x.a));
    put(floats + 4 * (at + LANES), Float16::gradient(x.b));
  }
  add_piece<uint32_t>(floats, (count + GROUP - 1) / GROUP * GROUP, words);
}

// A row of the norm's table has two addresses, as that of a step: the second is of the gradient. Each slot holds the
// words of a part: additions to one address wait for each other.
INLINE void sum_squares(const int64_t* table, const int32_t* tensor_of_program, int64_t count, int64_t* words, int64_t slots,
                        int threads) {
  in_parallel(count, threads, [=](int64_t k) {
    const Program x = find<2>(table, tensor_of_program, k);
    const auto add = [&](auto format) ALWAYS {
      const char* p = (const char*)x.row[1] + decltype(format)::BYTES * x.begin;
      int64_t* const slot = words + (x.size.number * slots + k % slots) * WORDS;
      for (int64_t at = 0; at < x.span; at += PIECE)
        add_pieces(format, p + decltype(format)::BYTES * at, least(x.span - at, PIECE), slot);
    };
    if (x.size.format == BFloat16::NUMBER) add(BFloat16{});
    else if (x.size.format == Float16::NUMBER) add(Float16{});
    else add(Float32{});
  });
}

#define EXPORT_NORM                                                                                \
  extern "C" void squares(PROGRAMS, int64_t* words, int64_t slots, int32_t threads) {              \
    sum_squares(table, tensor_of_program, count, words, slots, threads);                                       \
  }
