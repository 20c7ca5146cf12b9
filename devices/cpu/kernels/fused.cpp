// Neighbours of a layer in one call. With few rows, what Python does between two calls takes longer than a norm.

#include "numeric.h"

// y = x W^T + b in whatever form W is: `run` is one of the linear functions.
struct Product {
    void (*run)(const void *x, long x_stride, const void *weight, const void *bias, void *y, long rows, long outs,
                long ins, int threads);
    const void *weight, *bias;
    long outs, ins;

    void operator()(const void *x, long x_stride, void *y, long rows, int threads) const {
        run(x, x_stride, weight, bias, y, rows, outs, ins, threads);
    }
};

#define FOR_TYPE(NAME, T)                                                                                              \
    void add_rms_norm_##NAME(const T *x, const T *residual, const T *norm, T *normed, T *total, long rows, long size,  \
                             float eps, int threads);                                                                  \
    void silu_mul_##NAME(const T *gate_up, T *out, long rows, long size, int threads);                                 \
                                                                                                                       \
    void norm_linear_##NAME(const T *x, const T *residual, const T *norm, float eps, const Product *product,           \
                            T *normed, T *total, T *y, long rows, int threads) {                                       \
        add_rms_norm_##NAME(x, residual, norm, normed, total, rows, product->ins, eps, threads);                       \
        (*product)(normed, product->ins, y, rows, threads);                                                            \
    }                                                                                                                  \
    void linear_norm_##NAME(const T *x, long x_stride, const Product *product, const T *residual, const T *norm,       \
                            float eps, T *y, T *normed, T *total, long rows, int threads) {                            \
        (*product)(x, x_stride, y, rows, threads);                                                                     \
        add_rms_norm_##NAME(y, residual, norm, normed, total, rows, product->outs, eps, threads);                      \
    }                                                                                                                  \
    void gated_mlp_##NAME(const T *x, long x_stride, const Product *gate_up, const Product *down, T *wide, T *gated,   \
                          T *y, long rows, int threads) {                                                              \
        (*gate_up)(x, x_stride, wide, rows, threads);                                                                  \
        silu_mul_##NAME(wide, gated, rows, down->ins, threads);                                                        \
        (*down)(gated, down->ins, y, rows, threads);                                                                   \
    }

extern "C" {
FOR_TYPE(bf16, bf16)
FOR_TYPE(f32, float)
}
