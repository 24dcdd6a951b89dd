// One step of a lane, and the walk over the elements of all tensors.

// ── storages: a visible format, a weight, codes of states, and the planes of their fields ─────────
// step_cpp.py writes one as a struct Row with the types V, W, First, Second, Rest, and a LAYOUT.

struct Layout {
  int planes = 0, bytes[4] = {};
  int low = -1, first = -1, second = -1, rest = -1;  // planes
};

// ── one lane ─────────────────────────────────────────────────────────────────────────────────────

template <class R> struct StepScalars {
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
  struct Pending {
    Ints random;
    Floats weight, low, pending;
    typename R::Next next;
  };
  static constexpr bool IS_RANDOM = W::IS_RANDOM || First::IS_RANDOM || Second::IS_RANDOM;
  static constexpr bool IS_CUT_BY_STORE = W::STORED_FROM >= 0 && L.low != L.first;
  static constexpr int stored_from(int plane) {
    return IS_CUT_BY_STORE && plane == L.low ? W::STORED_FROM : 32 - 8 * L.bytes[plane];
  }
  INLINE Ints lane_of(const Lane& x, int plane) { return plane < 0 ? Ints{} : x.plane[plane]; }

  template <bool BLENDS> INLINE Pending begin(const Lane& x, const StepScalars<R>& n, const Scales& scales) {
    Pending y;
    y.weight = W::read(x.seen, W::take(lane_of(x, L.low)), y.low);
    const auto m = First::decode(lane_of(x, L.first), scales.first);
    const auto v = Second::decode(lane_of(x, L.second), scales.second);
    if constexpr (L.rest >= 0) y.next.rest = value_of(Rest::decode(x.plane[L.rest], scales.second));
    y.random = Ints{};
    if (IS_RANDOM) y.random = random_bits(int_of(y.weight) ^ V::mantissa(x.gradient), n.seed);
    const Floats w = finite_or_zero(y.weight), g = x.gradient * n.gradient_scale;
    y.pending = R::template begin<BLENDS>(w, g, m, v, y.next, n.rule);
    if constexpr (R::GIVEN) {
      const Floats weight = W::HAS_LOW ? y.weight + y.low : y.weight;
      y.pending = R::change(finite_or_zero(weight), x.given, Floats{}, n.rule);
    } else if constexpr (W::HAS_LOW) {
      y.pending = R::change(w, y.pending, y.next.first, n.rule);
    }
    return y;
  }
  // The weight and its change. Such a sum may be NaN where a weight is infinite: then it is
  // computed once more, and any NaN loses its sign and payload.
  template <bool IS_SAFE> INLINE Floats sum(const Pending& x, const StepScalars<R>& n) {
    Floats change = x.pending;
    if constexpr (!R::GIVEN)
      change = R::change(IS_SAFE ? finite_or_zero(x.weight) : x.weight, x.pending, x.next.first, n.rule);
    return IS_SAFE ? float_of(canonical_nan(x.weight + change)) : x.weight + change;
  }
  template <int PLANE, int32_t MASK, bool IS_LOWEST> INLINE void merge(Written& y, Ints code) {
    y.plane[PLANE] = IS_LOWEST ? code : chosen<MASK>(code, y.plane[PLANE]);
  }
  INLINE Written end(const Pending& x, Floats sum, const StepScalars<R>& n, const Scales& scales) {
    Written y{};
    Ints low;
    if constexpr (W::HAS_LOW) W::write(x.weight, x.low, x.pending, x.random, y.seen, low);
    else W::write(sum, x.random, y.seen, low);
    if constexpr (L.low >= 0) {
      constexpr bool IS_SHARED = L.low == L.first || L.low == L.second;  // then the next field cuts it
      y.plane[L.low] = IS_CUT_BY_STORE ? low : W::template place<IS_SHARED>(low);
    }
    // From the lowest bits on: each field has zeros above, or is cut by the next one.
    if constexpr (L.second >= 0)
      merge<L.second, Second::MASK, L.second != L.low>(y, Second::encode(x.next.second, x.random, scales.second));
    if constexpr (L.first >= 0) {
      constexpr bool IS_LOWEST = L.first != L.low && L.first != L.second;
      merge<L.first, First::MASK, IS_LOWEST>(y, First::encode(x.next.first, x.random, scales.first));
    }
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
  struct Lanes { Lane a, b; };
  INLINE int size_of(int stream, bool wide) {
    if (stream == 0) return V::BYTES;
    if (stream == 1) return wide ? 4 : V::BYTES;
    return stream < 2 + L.planes ? L.bytes[stream - 2] : 4;
  }
  template <int BYTES> INLINE Group fetch(const char* stream, int64_t at) {
    prefetch<BYTES>(stream + BYTES * at);
    return load<BYTES>(stream + BYTES * at);
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
      store<L.bytes[K], Step::stored_from(K)>(place, {x.plane[K], y.plane[K]});
      store_planes<K + 1>(p, at, x, y);
    }
  }
  // Step groups, so many with the scales of each block.
  template <bool BLENDS, bool WIDE>
  APART void step_groups(char* const* streams, int64_t count, const StepScalars<R>& numbers, const Scales* scales,
                         int64_t groups_of_block) {
    const StepScalars<R> n = numbers;  // copies, which no store changes
    char* p[STREAMS];
    for (int k = 0; k < STREAMS; k++) p[k] = streams[k];
    typename Step::Pending a, b, next_a, next_b;
    const auto begin = [&](int64_t at, const Scales& block) ALWAYS {
      const Lanes x = load_lanes<WIDE>(p, at);
      next_a = Step::template begin<BLENDS>(x.a, n, block);
      next_b = Step::template begin<BLENDS>(x.b, n, block);
    };
    const auto end = [&](int64_t at, const Scales& block) ALWAYS {
      Floats sum_a{}, sum_b{};
      if constexpr (!Step::W::HAS_LOW) {
        sum_a = Step::template sum<!ASKS>(a, n), sum_b = Step::template sum<!ASKS>(b, n);
        if (ASKS && any_nan(sum_a, sum_b))
          sum_a = Step::template sum<true>(a, n), sum_b = Step::template sum<true>(b, n);
      }
      const Written x = Step::end(a, sum_a, n, block), y = Step::end(b, sum_b, n, block);
      store<V::BYTES>(p[0] + V::BYTES * at, {V::word(x.seen), V::word(y.seen)});
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
  INLINE void step(char* const* p, int64_t count, bool wide, const StepScalars<R>& n, const Scales* s, int64_t of_block) {
    const bool always_blends = R::always_blends(n.rule);
    if (wide) {
      always_blends ? step_groups<true, true>(p, count, n, s, of_block) : step_groups<false, true>(p, count, n, s, of_block);
    } else if constexpr (V::BYTES == 2) {
      always_blends ? step_groups<true, false>(p, count, n, s, of_block) : step_groups<false, false>(p, count, n, s, of_block);
    }
  }
  // Step elements in blocks of a width, the first of which has the first scales: whole groups, and the
  // rest in a copy padded with zeros.
  INLINE void step_all(char* const* p, int64_t count, bool wide, const StepScalars<R>& n, const Scales* s, int64_t width) {
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
template <class T, bool HAS_END> APART T largest_magnitude(const char* p, int64_t count, T end) {
  constexpr T ALL = (T)((uint64_t)-1 >> (65 - 8 * sizeof(T)));
  T largest = 0;
  for (int64_t at = 0; at < count; at++) {
    T x = at_address<T>(p + sizeof(T) * at) & ALL;
    if (HAS_END) x = x <= end ? x : 0;
    largest = x > largest ? x : largest;
  }
  return largest;
}
// As a word at the top of a lane.
template <class V, bool IS_FINITE> INLINE int32_t peak_of(const char* p, int64_t count, bool wide) {
  if (wide || V::BYTES == 4) return largest_magnitude<int32_t, IS_FINITE>(p, count, EXPONENT - 1);
  const int16_t end = V::BELOW == 16 ? 0x7F7F : 0x7BFF;
  return (int32_t)largest_magnitude<int16_t, IS_FINITE>(p, count, end) << 16;
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
template <class R> INLINE Moments new_bounds(Floats gradient, Floats w, Moments old, const StepScalars<R>& n) {
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
template <int ADDRESSES> INLINE Program find(const int64_t* table, const int32_t* tensor_of_program, int64_t number) {
  Program x;
  x.row = table + tensor_of_program[number] * (ADDRESSES + sizeof x.size / 8);
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

template <class S, class R> struct LaunchTable {
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
                         const StepScalars<R>& n, Scales* scales) {
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
  INLINE void step_blocks(const Program& x, bool wide, const StepScalars<R>& n) {
    const int64_t columns = x.size.columns, of_row = (columns + BLOCK - 1) / BLOCK;
    const int64_t width = least(columns, BLOCK);
    const bool is_joined = columns % width == 0 && width % GROUP == 0;
    int64_t number = x.block % of_row, row = x.block / of_row;  // of a block in its row
    const int64_t batch = least(LANES, 4096 / (BLOCK * W::size_of(1, wide)));  // whose gradients stay near
    for (int64_t at = 0; at < x.blocks; at += batch) {
      const int64_t count = least(x.blocks - at, batch);
      int64_t begins[LANES], sizes[LANES];
      Ints gradients{}, weights{};
      for (int k = 0; k < count; k++) {
        const int64_t column = number * BLOCK;
        begins[k] = row * columns + column;
        sizes[k] = least(columns - column, BLOCK);
        if (++number == of_row) number = 0, row++;
        const Streams y = streams_at(x, wide, begins[k]);
        gradients[k] = peak_of<V, false>(y.p[1], sizes[k], wide);
        if constexpr (R::PENALIZED) weights[k] = peak_of<V, true>(y.p[0], sizes[k], false);
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
  INLINE void step(const int64_t* table, const int32_t* tensor_of_program, int64_t count, const float* numbers,
                   const float* control, int threads) {
    in_parallel(count, threads, [=](int64_t k) {
      const Program x = find<ADDRESSES>(table, tensor_of_program, k);
      const bool wide = x.size.format == Float32::NUMBER;
      StepScalars<R> n;
      n.gradient_scale = control[0];
      memcpy((void*)&n.rule, numbers, 4 * SCALARS);
      n.seed = int_of(numbers[SCALARS]);
      const Scales none{};
      if constexpr (BOUNDS > 0) step_blocks(x, wide, n);
      else W::step_all(streams_at(x, wide, x.begin).p, x.span, wide, n, &none, x.span);
    });
  }
  // The sample of an audit: the change of some elements by a rule with moments that no storage cuts, [states, count].
  INLINE void follow(const int64_t* table, const int32_t* tensors, int64_t count, const int64_t* places,
                     const float* numbers, const float* control, float* moments, float* changes) {
    typedef typename Exact<R>::Rule EXACT;
    typename EXACT::Scalars s;
    memcpy((void*)&s, numbers, sizeof s);
    for (int64_t at = 0; at < count; at += LANES) {
      const int64_t size = 4 * least(count - at, LANES);
      Lane x{};
      Ints gradient{}, is_wide{};
      for (int k = 0; 4 * k < size; k++) {
        const int64_t *row = table + tensors[at + k] * (ADDRESSES + sizeof(Sizes) / 8), place = places[at + k];
        is_wide[k] = -(row[ADDRESSES + 3] == Float32::NUMBER);
        const auto word = [&](int stream) ALWAYS {  // at the top
          const int bytes = W::size_of(stream, is_wide[k]);
          int32_t y = 0;
          memcpy((char*)&y + 4 - bytes, (char*)row[stream] + bytes * place, bytes);
          return y;
        };
        x.seen[k] = word(0), gradient[k] = word(1);
        for (int plane = 0; plane < S::LAYOUT.planes; plane++) x.plane[plane][k] = word(2 + plane);
      }
      Floats low{}, old[2]{};
      for (int k = 0; k < EXACT::STATES; k++) memcpy((void*)&old[k], moments + k * count + at, size);
      Floats weight = S::W::read(V::bits(x.seen), S::W::take(W::Step::lane_of(x, S::LAYOUT.low)), low);
      if (S::W::HAS_LOW) weight += low;
      const Floats w = finite_or_zero(weight), g = where(is_wide, float_of(gradient), V::gradient(gradient));
      Moments next{};
      const Floats pending = EXACT::template begin<false>(w, g * control[0], old[0], old[1], next, s);
      const Floats now[3] = {next.first, next.second, EXACT::change(w, pending, next.first, s)};
      for (int k = 0; k < EXACT::STATES; k++) memcpy(moments + k * count + at, &now[k], size);
      memcpy(changes + at, &now[2], size);
    }
  }
};

// ── what a library of a step exports ──────────────────────────────────────────────────────────────

#define PROGRAMS const int64_t *table, const int32_t *tensor_of_program, int64_t count
// Tensors of elements stand in the place of the programs of a sample.
#define EXPORT_STEP(...)                                                                           \
  extern "C" void step(PROGRAMS, const float* numbers, const float* control, int32_t threads) {    \
    LaunchTable<__VA_ARGS__>::step(table, tensor_of_program, count, numbers, control, threads);                   \
  }                                                                                                \
  extern "C" void follow(PROGRAMS, const int64_t* places, const float* numbers,                    \
                         const float* control, float* moments, float* changes, int32_t) {          \
    LaunchTable<__VA_ARGS__>::follow(table, tensor_of_program, count, places, numbers, control, moments, changes); \
  }
// The sample of an audit: some elements of every tensor.
extern "C" void gather(const int64_t* addresses, const int32_t* numbers, int64_t count, const int64_t* places,
                       char* out, int32_t bytes) {
  for (int64_t k = 0; k < count; k++)
    memcpy(out + bytes * k, (const char*)addresses[numbers[k]] + bytes * places[k], bytes);
}
// Read counts of steps, and add to them. Two may be one.
extern "C" void add(float* const* counts, float* out, int64_t count, int32_t by) {
  for (int64_t k = 0; k < count; k++) out[k] = *counts[k];
  for (int64_t k = 0; k < count; k++) *counts[k] = out[k] + by;
}
