// Update rules, in the order of the operations of rules/elementwise.py.
//
// begin computes the new states, and returns what must wait for a square root or a division. change
// ends the step. Scalars are those of the Python rule, in its order. PENALIZED: states depend on the
// weight. GIVEN: a matrix rule, whose change is a stream.

struct Moments { Floats first, second; };
struct Parts : Moments { Floats rest; };  // the second part of the second moment, old and new
// An average moved by a share. BLENDS: no share is 1, which would give the value itself.
template <bool BLENDS> INLINE Floats lerp(Floats old, Floats x, float share) {
  return BLENDS || share != 1 ? old + (x - old) * share : x;
}
template <bool BLENDS> INLINE Floats lerp(Product old, Floats x, float share) {
  return BLENDS || share != 1 ? fused(old.x, old.by, fused(-old.x, old.by, x) * share) : x;
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
  template <bool BLENDS, class A, class B>    \
  INLINE Floats begin(Floats w, Floats g, A old_m, B old_v, Moments& next, const Scalars& s)
#define CHANGE INLINE Floats change(Floats w, Floats pending, Floats m, const Scalars& s)
#define ALWAYS_BLENDS INLINE bool always_blends(const Scalars& s)

struct AdamScalars {
  float one_minus_beta1, one_minus_beta2, negative_step_size, inverse_root_correction2, eps;
};
template <bool BLENDS, class A, class B>
INLINE Floats begin_adam(Floats g, A old_m, B old_v, Moments& next, const AdamScalars& s) {
  next.first = lerp<BLENDS>(old_m, g, s.one_minus_beta1);
  next.second = unless_frozen(old_v, lerp<BLENDS>(old_v, g * g, s.one_minus_beta2));
  return root(next.second);
}
INLINE Floats end_adam(Floats root_v, Floats m, const AdamScalars& s) {
  return m / (root_v * s.inverse_root_correction2 + s.eps) * s.negative_step_size;
}
struct AdamW : Rule<2> {
  struct Scalars : AdamScalars { float negative_decay; };
  ALWAYS_BLENDS { return s.one_minus_beta1 != 1 && s.one_minus_beta2 != 1; }
  BEGIN { return begin_adam<BLENDS>(g, old_m, old_v, next, s); }
  CHANGE { return end_adam(pending, m, s) + s.negative_decay * w; }
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
  template <bool BLENDS, class A, class B>
  INLINE Floats begin(Floats, Floats g, A old_m, B old_v, Parts& next, const Scalars& s) {
    g = narrow(float_of(canonical_nan(g)));
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
    const Floats root_v = narrow(narrow(pending) * s.inverse_root_correction2);
    const Floats step = narrow(narrow(m * s.negative_step_size) / narrow(root_v + s.eps));
    return narrow(step + narrow(w * s.negative_decay));
  }
};
// The rule that a storage rounds.
template <class R> struct Exact { typedef R Rule; };
template <int DROP, bool IS_PAIR> struct Exact<Collage<DROP, IS_PAIR>> { typedef AdamW Rule; };
struct Adam : Rule<2, true> {
  struct Scalars : AdamScalars { float weight_decay; };
  ALWAYS_BLENDS { return s.one_minus_beta1 != 1 && s.one_minus_beta2 != 1; }
  BEGIN { return begin_adam<BLENDS>(g + w * s.weight_decay, old_m, old_v, next, s); }
  CHANGE { return end_adam(pending, m, s); }
};
struct SGD : Rule<1, true> {
  struct Scalars {
    float weight_decay, momentum, gain, share_of_gradient, share_of_momentum, negative_lr;
  };
  ALWAYS_BLENDS { return true; }
  BEGIN {
    g = g + w * s.weight_decay;
    next.first = value_of(old_m) * s.momentum + g * s.gain;
    return g;
  }
  CHANGE { return (pending * s.share_of_gradient + m * s.share_of_momentum) * s.negative_lr; }
};
struct PlainSGD : Rule<0, true> {
  struct Scalars { float weight_decay, negative_lr; };
  ALWAYS_BLENDS { return true; }
  BEGIN { return g + w * s.weight_decay; }
  CHANGE { return pending * s.negative_lr; }
};
struct Lion : Rule<1> {
  struct Scalars { float one_minus_beta1, one_minus_beta2, negative_lr, negative_decay; };
  ALWAYS_BLENDS { return s.one_minus_beta1 != 1 && s.one_minus_beta2 != 1; }
  BEGIN {
    const Floats direction = lerp<BLENDS>(old_m, g, s.one_minus_beta1);
    next.first = lerp<BLENDS>(old_m, g, s.one_minus_beta2);
    return where(direction > 0, 1.0f, where(direction < 0, -1.0f, 0.0f));
  }
  CHANGE { return pending * s.negative_lr + w * s.negative_decay; }
};
struct Muon : Rule<1, false, true> {
  struct Scalars { float negative_decay, momentum, one_minus_momentum, nesterov; };
  ALWAYS_BLENDS { return s.one_minus_momentum != 1; }
  BEGIN { return next.first = lerp<BLENDS>(old_m, g, s.one_minus_momentum); }
  CHANGE { return pending + w * s.negative_decay; }
};
// A matrix rule whose states have shapes of their own: only the decay is left.
struct Given : Rule<0, false, true> {
  struct Scalars { float negative_decay; };
  ALWAYS_BLENDS { return true; }
  BEGIN { return g; }
  CHANGE { return pending + w * s.negative_decay; }
};
