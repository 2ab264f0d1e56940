// What is done to one row at a time: norm, rope, activation.
#pragma once

#include "base/simd.h"

namespace fd {

/// The inverse root mean square of n floats. Sums in kLanes parts and a scalar tail, always in the same order.
inline float inverse_rms(const float* x, int n, float eps) {
    V parts = vset(0.0f);
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) parts = vfma(vload(x + i), vload(x + i), parts);
    float sum = vsum(parts);
    for (; i < n; i++) sum += x[i] * x[i];
    return 1.0f / std::sqrt(sum / float(n) + eps);
}

/// y = x / rms(x) * weight; x and y may be the same.
template <class E>
void rms_norm(const float* x, const float* weight, int n, float eps, E* y) {
    const float scale = inverse_rms(x, n, eps);
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) vstore(y + i, vload(x + i) * vset(scale) * vload(weight + i));
    for (; i < n; i++) put(y + i, x[i] * scale * weight[i]);
}

/// y = (x - mean) / deviation * weight + bias; x and y may be the same.
inline void layer_norm(const float* x, const float* weight, const float* bias, int n, float eps, float* y) {
    V parts = vset(0.0f);
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) parts = parts + vload(x + i);
    float mean = vsum(parts);
    for (; i < n; i++) mean += x[i];
    mean /= float(n);
    for (i = 0; i + kLanes <= n; i += kLanes) vstore(y + i, vload(x + i) - vset(mean));
    for (; i < n; i++) y[i] = x[i] - mean;
    const float scale = inverse_rms(y, n, eps);
    for (i = 0; i + kLanes <= n; i += kLanes)
        vstore(y + i, vfma(vload(y + i) * vset(scale), vload(weight + i), vload(bias + i)));
    for (; i < n; i++) y[i] = y[i] * scale * weight[i] + bias[i];
}

/// The same RMS norm in pieces: `load(first, count, y)` writes `count` of its values from the first-th on to y.
inline auto normed(const float* x, const float* weight, int n, float eps) {
    const float scale = inverse_rms(x, n, eps);
    return [=](int first, int count, float* y) {
        int i = 0;
        for (; i + kLanes <= count; i += kLanes)
            vstore(y + i, vload(x + first + i) * vset(scale) * vload(weight + first + i));
        for (; i < count; i++) y[i] = x[first + i] * scale * weight[first + i];
    };
}

/// Rotate the first 2 * half elements of one head in place.
inline void rotate(float* __restrict x, const float* __restrict cos, const float* __restrict sin, int half,
                   bool interleaved) {
    if (interleaved) {
        for (int i = 0; i < half; i++) {
            const float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = a * cos[i] - b * sin[i];
            x[2 * i + 1] = b * cos[i] + a * sin[i];
        }
        return;
    }
    float* __restrict y = x + half;
    for (int i = 0; i < half; i++) {
        const float a = x[i], b = y[i];
        x[i] = a * cos[i] - b * sin[i];
        y[i] = b * cos[i] + a * sin[i];
    }
}

/// Round n floats to the element type.
template <class E>
void convert(const float* x, int n, E* y) {
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) vstore(y + i, vload(x + i));
    for (; i < n; i++) put(y + i, x[i]);
}

enum class Activation : int {
    none = -1, silu = 0, gelu_tanh = 1, gelu = 2, relu = 3, relu2 = 4, quick_gelu = 5, clamped_swiglu = 6
};

/// log2 of the probability that a normal variable exceeds u, 0 <= u <= 12: u times its power of two is exact to 1e-7.
inline V log2_of_normal_tail(V u) {
    // Least largest error of u * 2^p on [0, 6], by reweighted least squares.
    V p = vset(-1.690343083e-6f);
    p = vfma(p, u, vset(2.508252146e-5f));
    p = vfma(p, u, vset(-1.144584166e-4f));
    p = vfma(p, u, vset(-3.233542084e-4f));
    p = vfma(p, u, vset(7.333403453e-3f));
    p = vfma(p, u, vset(-5.271421745e-2f));
    p = vfma(p, u, vset(-4.591154158e-1f));
    p = vfma(p, u, vset(-1.151123285f));
    return vfma(p, u, vset(-9.999988675e-1f));
}

inline V activate(V x, Activation kind) {
    switch (kind) {
        case Activation::none:
            return x;
        case Activation::relu:
            return vmax(vset(0.0f), x);  // in this order, which keeps NaN
        case Activation::relu2:
            return vmax(vset(0.0f), x) * x;
        case Activation::quick_gelu:
            return x / (vset(1.0f) + vexp(vset(-1.702f) * x));
        case Activation::silu:
            return x / (vset(1.0f) + vexp(vset(0.0f) - x));
        case Activation::gelu_tanh: {
            V inner = vset(0.7978845608f) * vfma(vset(0.044715f) * x * x, x, x);
            return vset(0.5f) * x * (vset(1.0f) + vtanh(inner));
        }
        default: {
            const V u = vmin(vset(12.0f), vmax(x, vset(0.0f) - x));  // in this order, which keeps NaN
            return vmax(vset(0.0f), x) - u * vexp2(log2_of_normal_tail(u));
        }
    }
}

/// What a gated layer makes of a gate and up.
inline V gated(V gate, V up, Activation kind) {
    if (kind != Activation::clamped_swiglu) return activate(gate, kind) * up;
    const V most = vset(7.0f), clamped = vmax(vset(-7.0f), vmin(most, up));  // in this order, which keeps NaN
    return activate(vmin(most, gate), Activation::quick_gelu) * (clamped + vset(1.0f));
}

inline V softcapped(V x, float cap) { return vset(cap) * vtanh(x * vset(1.0f / cap)); }

}  // namespace fd
