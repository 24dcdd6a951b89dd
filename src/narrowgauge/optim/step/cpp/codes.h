// Rounding, visible formats, and codes of states and weights.

// ── rounding ─────────────────────────────────────────────────────────────────────────────────────

// Bits of a float, with one NaN, which has neither sign nor payload.
INLINE Ints canonical_nan(Floats x) { return where(x != x, 0x7FC00000, int_of(x)); }
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
struct RandomSlice {
  int start = -1, borrowed = 0;
};
// Add random bits below the bits that stay, or what rounds to nearest.
template <int DROP, RandomSlice RANDOM_SLICE> INLINE Ints dithered(Ints x, Ints random) {
  if constexpr (RANDOM_SLICE.start < 0) return rounded<DROP>(x);
  if constexpr (RANDOM_SLICE.borrowed) {
    random = random << RANDOM_SLICE.borrowed | shifted_down(random, 32 - RANDOM_SLICE.borrowed);
  }
  if constexpr (RANDOM_SLICE.start + DROP == 32) return x + shifted_down(random, RANDOM_SLICE.start);
  return x + (random >> RANDOM_SLICE.start & ((1 << DROP) - 1));
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
  INLINE Ints encode(Floats x, Ints, const Scale&) { return rounded<DROP>(canonical_nan(x)); }
  INLINE Ints toward_zero(Floats x) { return canonical_nan(x); }
  static constexpr int32_t MASK = -1;
};
// A small float of E exponent and M mantissa bits from BIT on, whose smallest normal value is
// 2^LOWEST. It has subnormals. Larger values and NaN become the largest. HELD: what is not zero stays
// so. SCALED: below the power of two that ends its block.
template <int E, int M, int LOWEST, int KIND, int BIT, RandomSlice RANDOM_SLICE> struct Window {
  static constexpr int DROP = 23 - M, EXPONENT_OFFSET = LOWEST + 126, LAST = ((1 << (E + M)) - 1) << DROP;
  static constexpr int SIGN_PLACE = BIT + E + M;
  static constexpr bool IS_SIGNED = KIND & SIGNED, IS_SCALED = KIND & SCALED, IS_RANDOM = RANDOM_SLICE.start >= 0;
  // The least value of a block, at the least scale, is a float32.
  static constexpr bool IS_EXACT = !IS_SCALED || LOWEST - M - 112 >= -149;

  INLINE auto decode(Ints lane, const Scale& scale) {
    const bool has_sign = IS_SIGNED && SIGN_PLACE == 31;  // in its place
    Ints bits = moved(lane, DROP - BIT) & (has_sign ? LAST | SIGN_BIT : LAST);
    if constexpr (IS_SIGNED && SIGN_PLACE < 31) bits |= lane << (31 - SIGN_PLACE) & SIGN_BIT;
    const Floats x = float_of(bits);
    if constexpr (!IS_SCALED) return Product{x, splat(power(EXPONENT_OFFSET))};
    else if constexpr (IS_EXACT) return Product{x * power(EXPONENT_OFFSET), splat(scale.back)};
    else return x * power(EXPONENT_OFFSET) * scale.back;
  }
  // Random bits that are 0 round toward zero.
  INLINE Ints toward_zero(Floats x) {
    return Window<E, M, LOWEST, KIND, BIT, RandomSlice{0}>::encode(x, Ints{}, Scale{});
  }
  // In its place, with other bits around it.
  static constexpr int32_t MASK = -1 << BIT;
  INLINE Ints encode(Floats x, Ints random, const Scale& scale) {
    const Floats inside = (IS_SCALED ? x * scale.into : x) * power(-EXPONENT_OFFSET);
    constexpr int MOVE = BIT - DROP;
    Ints code;
    if constexpr (!IS_SIGNED) {
      code = dithered<DROP, RANDOM_SLICE>(smaller_unsigned(int_of(inside), LAST), random);
      if constexpr (KIND & HELD) code = held(code, int_of(x), 1 << DROP);
      return MOVE >= 0 ? code << MOVE : shifted_down(code, -MOVE);
    }
    const Floats last = splat(float_of(LAST));
    const Ints bits = int_of(larger(smaller(inside, last), -last));
    if constexpr (KIND & HELD)
      code = moved(held(dithered<DROP, RANDOM_SLICE>(bits & MAGNITUDE, random), larger(int_of(x), 0), 1 << DROP), MOVE);
    else if constexpr (MOVE >= 0 && RANDOM_SLICE.start >= 0 && !RANDOM_SLICE.borrowed)
      code = (bits << MOVE) + (moved(random, MOVE - RANDOM_SLICE.start) & ((1 << DROP) - 1) << MOVE);
    else code = moved(dithered<DROP, RANDOM_SLICE>(bits & MAGNITUDE, random), MOVE);
    if constexpr (SIGN_PLACE == 31) return chosen<SIGN_BIT>(bits, code);
    else return chosen<1 << SIGN_PLACE>(shifted_down(bits, 31 - SIGN_PLACE), code);
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
  const Floats sum = narrow<DROP>(x.high + a), rounded_a = sum - x.high;
  const Floats error = (x.high - (sum - rounded_a)) + (a - rounded_a);
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
INLINE Floats finite_or_zero(Floats w) {
  const auto kept = [&] { return int_of(w) & ((int_of(w) & MAGNITUDE) < EXPONENT); };
  return float_of(BY_LANES(kept(), (Ints)AVX2(psignd, int_of(w), ~int_of(w) & EXPONENT), kept()));
}
struct Whole {  // fills its lane
  static constexpr int STORED_FROM = -1;
  static constexpr bool HAS_LOW = false, IS_RANDOM = false;
  INLINE Ints take(Ints lane) { return lane; }
  template <bool IS_CUT> INLINE Ints place(Ints x) { return x; }
  static constexpr int32_t MASK = -1;
};
// No more than the visible weight, to nearest or by chance.
template <class V, RandomSlice RANDOM_SLICE> struct VisibleOnly : Whole {
  static constexpr bool IS_RANDOM = RANDOM_SLICE.start >= 0;
  INLINE Floats read(Ints seen, Ints, Floats&) { return V::value(seen); }
  INLINE void write(Floats sum, Ints random, Ints& seen, Ints&) {
    const Ints x = int_of(V::scaled(sum));
    seen = V::in_range(cut<V::BELOW>(dithered<V::BELOW, RANDOM_SLICE>(x, random)));
  }
};
// The signed rest of BITS bits from BIT on. DROP bits below are dropped by chance.
template <class V, int BITS, int DROP, int BIT, RandomSlice RANDOM_SLICE> struct Tail {
  static constexpr int HALF = 1 << V::BELOW >> 1, STORED_FROM = V::BELOW == 16 ? DROP : -1;
  static constexpr bool HAS_LOW = false, IS_RANDOM = RANDOM_SLICE.start >= 0;
  INLINE Ints take(Ints lane) { return moved(lane, 32 - BITS - BIT) >> (32 - BITS - DROP); }
  static constexpr int32_t MASK = -1 << BIT;
  template <bool IS_CUT> INLINE Ints place(Ints tail) {
    return moved(tail, BIT - DROP) & (IS_CUT ? -1 : (int32_t)(((1ll << BITS) - 1) << BIT));
  }
  // A weight that other code wrote moves by half an ulp at most, and a zero does not change its sign.
  INLINE Floats read(Ints seen, Ints tail, Floats&) {
    return V::value(((seen + tail) ^ seen) < 0 ? seen : seen + tail);
  }
  INLINE void write(Floats sum, Ints random, Ints& seen, Ints& tail) {
    const Ints x = dithered<DROP, RANDOM_SLICE>(int_of(V::scaled(sum)), random);
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
  INLINE Ints visible(Floats x) { return V::in_range(cut<V::BELOW>(canonical_nan(V::scaled(x)) + HALF)); }
  INLINE Floats read(Ints seen, Ints master, Floats&) {
    const Floats stored = float_of(master);
    return where(visible(stored) == V::in_range(seen), stored, V::value(seen));
  }
  INLINE void write(Floats x, Ints, Ints& seen, Ints& master) {
    seen = visible(x);
    master = int_of(x);
  }
};
// A second part in a code of 16 bits. It belongs to the weight if their sum rounds to it.
template <class V, class Low> struct InTwoParts : Whole {
  static constexpr bool HAS_LOW = true;
  INLINE Ints belongs(Ints seen, Floats low) {
    return cut<V::BELOW>(rounded<V::BELOW>(int_of(V::scaled(V::value(seen) + low)))) == seen;
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
    return is_own ? nearest : Low::toward_zero(rest);
  }
};
// Kahan's: what the weight did not absorb is added to the next change.
template <class V, class Low> struct Compensated : InTwoParts<V, Low> {
  INLINE void write(Floats weight, Floats low, Floats change, Ints, Ints& seen, Ints& lane) {
    const Floats total = low + change;
    seen = cut<V::BELOW>(rounded<V::BELOW>(canonical_nan(weight + total)));
    lane = InTwoParts<V, Low>::encode(seen, total - (V::value(seen) - weight));
  }
};
// Collage's: a pair grows by the change. An infinite one, or NaN, stays, without a second part.
template <class V, class Low> struct CollagePair : InTwoParts<V, Low> {
  INLINE void write(Floats weight, Floats low, Floats change, Ints, Ints& seen, Ints& lane) {
    const Pair grown = grow<V::BELOW>({finite_or_zero(weight), low}, change);
    const Ints stays = (int_of(weight) & MAGNITUDE) >= EXPONENT;
    const Ints bits = canonical_nan(V::scaled(where(stays, weight, grown.high)));
    seen = V::in_range(cut<V::BELOW>(rounded<V::BELOW>(bits)));
    lane = InTwoParts<V, Low>::encode(seen, where(stays, 0.0f, grown.low));
  }
};
