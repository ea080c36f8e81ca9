// What Python sees: one class per scalar codec around its arrays, and the functions of the sparse and low-rank
// ones. Everything that could reach memory outside of an array is checked here.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

#include "lowrank.h"
#include "scalar.h"
#include "select.h"
#include "sparse.h"

namespace py = pybind11;
using namespace kernels;

namespace {

using Array = py::array;
using Maybe = std::optional<py::array>;

void require(bool condition, const char* what) {
    if (!condition) throw py::value_error(what);
}

// Arrays are never converted: a copy would be written to in place of the array.
template <class T>
const T* read(const Array& array, size_t length) {
    if (!py::isinstance<py::array_t<T, py::array::c_style>>(array)) throw py::type_error("wrong dtype, or gaps");
    require(static_cast<size_t>(array.size()) == length, "an array has another length than the layout says");
    require(reinterpret_cast<uintptr_t>(array.data()) % alignof(T) == 0, "an array is not aligned");
    return static_cast<const T*>(array.data());
}

template <class T>
T* write(const Array& array, size_t length) {
    require(array.writeable(), "an array is read-only");
    return const_cast<T*>(read<T>(array, length));
}

// Of a payload, which encode() writes and decode() reads: whether it may be written is checked by encode().
template <class T>
T* part(const Array& array, size_t length) {
    return const_cast<T*>(read<T>(array, length));
}

size_t length(const Array& array) { return static_cast<size_t>(array.size()); }

// DGC's momentum with the arrays it works on, kept alive.
struct BoundMomentum {
    Momentum momentum;
    Array velocity;
    Maybe weights;
};

using MaybeMomentum = const BoundMomentum*;  // None

Momentum momentum_of(MaybeMomentum given, size_t n, bool writes) {
    if (!given) return {};
    require(!writes || given->velocity.writeable(), "a velocity is read-only");
    Momentum momentum = given->momentum;
    momentum.velocity = part<float>(given->velocity, n);
    momentum.weights = given->weights ? read<float>(*given->weights, n) : nullptr;
    return momentum;
}

Source source_of(const Array& grad, const Maybe& residual, float scale, MaybeMomentum momentum, size_t n) {
    require(!momentum || residual, "momentum without a residual");
    return {read<float>(grad, n), residual ? read<float>(*residual, n) : nullptr, scale, momentum_of(momentum, n, false)};
}

Sink sink_of(Array& target, const Maybe& grad, float scale, MaybeMomentum momentum, size_t n) {
    require(!momentum || grad, "momentum of an accumulator");
    return {write<float>(target, n), grad ? read<float>(*grad, n) : nullptr, scale, momentum_of(momentum, n, true)};
}

// A codec with the arrays it works on, kept alive.
template <class Codec>
struct Bound {
    Codec codec;
    Blocks blocks;
    std::vector<Array> parts;
    std::vector<Array> tables = {};

    void encode(const Array& grad, const Maybe& residual, float scale, MaybeMomentum momentum, int threads) {
        for (const Array& each : parts) require(each.writeable(), "a part is read-only");
        const Source source = source_of(grad, residual, scale, momentum, blocks.n);
        py::gil_scoped_release released;
        if constexpr (std::is_same_v<Codec, Natural>) codec.find_base(source, blocks.n);
        kernels::encode(codec, source, blocks, threads);
    }

    void decode(Array& target, const Maybe& grad, float scale, MaybeMomentum momentum, int threads) {
        const Sink sink = sink_of(target, grad, scale, momentum, blocks.n);
        py::gil_scoped_release released;
        kernels::decode(codec, sink, blocks, threads);
    }

    // This one's and the other ranks' payloads; all are of the same codec on the same tensor.
    void mean(const std::vector<const Bound*>& others, Array& target, float ranks, int threads) const {
        std::vector<const Codec*> payloads{&codec};
        for (const Bound* each : others) {
            require(each && each->blocks.n == blocks.n && each->blocks.block == blocks.block, "payloads of other tensors");
            payloads.push_back(&each->codec);
        }
        float* const to = write<float>(target, blocks.n);
        py::gil_scoped_release released;
        kernels::mean(payloads, to, ranks, blocks, threads);
    }
};

template <class Codec>
py::class_<Bound<Codec>> bind(py::module_& m, const char* name) {
    return py::class_<Bound<Codec>>(m, name)
        .def("encode", &Bound<Codec>::encode, py::arg("grad").noconvert(), py::arg("residual").noconvert(),
             py::arg("scale"), py::arg("momentum"), py::arg("threads"))
        .def("decode", &Bound<Codec>::decode, py::arg("target").noconvert(), py::arg("grad").noconvert(),
             py::arg("scale"), py::arg("momentum"), py::arg("threads"))
        .def("mean", &Bound<Codec>::mean, py::arg("others"), py::arg("target").noconvert(), py::arg("ranks"),
             py::arg("threads"));
}

Blocks blocks_of(size_t n, size_t block, bool tree = false) {
    require(n > 0 && block > 0, "a tensor or a block without elements");
    require(block % 8 == 0 || block >= n, "a block that is no multiple of 8");
    require(!tree || block <= TILE, "a block that is too long");
    return {n, block};
}

}  // namespace

PYBIND11_MODULE(HVD_GRADCOMP_MODULE, m) {
    m.attr("TILE") = TILE;

    m.def("supported", [] {
#if defined(__x86_64__)
        __builtin_cpu_init();
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
            return "avx512";
        if (__builtin_cpu_supports("avx2")) return "avx2";
#endif
        return "portable";
    }, "The fastest of the builds that this processor runs.");

    py::class_<BoundMomentum>(m, "Momentum")
        .def(py::init([](Array velocity, Maybe weights, float momentum, float decay, float clip, bool nesterov) {
            return BoundMomentum{{nullptr, nullptr, momentum, decay, clip, nesterov}, velocity, weights};
        }));

    bind<Uniform>(m, "Uniform").def(
        py::init([](size_t n, size_t block, Array step, Maybe low, Array codes, int bits,
                    bool stochastic, uint32_t first, uint32_t second) {
            const Blocks blocks = blocks_of(n, block);
            require(bits >= 1 && bits <= 16 && (low || bits >= 2), "bits");
            return Bound<Uniform>{{part<float>(step, blocks.count()), low ? part<float>(*low, blocks.count()) : nullptr,
                                   part<uint8_t>(codes, packed_nbytes(n, bits)), bits, !low, stochastic, {first, second}},
                                  blocks, low ? std::vector<Array>{step, *low, codes} : std::vector<Array>{step, codes}};
        }));
    bind<Log>(m, "Log").def(
        py::init([](size_t n, size_t block, Array scale, Array codes, int bits, Array values, Array steps, int shift,
                    int32_t lowest) {
            const Blocks blocks = blocks_of(n, block);
            require(bits >= 2 && bits <= 16 && shift >= 0 && shift < 32, "bits");
            const int32_t last = (0x3F800000 >> shift) - lowest;  // the key of 1, which is the largest
            require(lowest >= 0 && last >= 0, "keys");
            return Bound<Log>{{part<float>(scale, blocks.count()), part<uint8_t>(codes, packed_nbytes(n, bits)), bits,
                               read<float>(values, size_t{1} << bits),
                               read<uint32_t>(steps, static_cast<size_t>(last) + 1), shift, lowest},
                              blocks, {scale, codes}, {values, steps}};
        }));
    bind<Sign>(m, "Sign").def(py::init([](size_t n, size_t block, Array scale, Array signs) {
        const Blocks blocks = blocks_of(n, block, true);
        return Bound<Sign>{{part<float>(scale, blocks.count()), part<uint8_t>(signs, packed_nbytes(n, 1)), block},
                           blocks, {scale, signs}};
    }));
    bind<Ternary>(m, "Ternary").def(
        py::init([](size_t n, size_t block, Array scale, Array digits, bool error_feedback,
                    uint32_t first, uint32_t second) {
            const Blocks blocks = blocks_of(n, block, true);
            return Bound<Ternary>{{part<float>(scale, blocks.count()), part<uint8_t>(digits, (n + 4) / 5), n, block, error_feedback,
                                   {first, second}}, blocks, {scale, digits}};
        }));
    bind<Qsgd>(m, "Qsgd").def(
        py::init([](size_t n, size_t block, Array step, Array codes, int levels, bool error_feedback,
                    uint32_t first, uint32_t second) {
            const Blocks blocks = blocks_of(n, block, true);
            require(levels >= 1 && levels <= 32767, "levels");
            int bits = 1;
            while (levels >> (bits - 1)) ++bits;
            return Bound<Qsgd>{{part<float>(step, blocks.count()), part<uint8_t>(codes, packed_nbytes(n, bits)), block, levels, bits,
                                error_feedback, {first, second}}, blocks, {step, codes}};
        }));
    bind<Natural>(m, "Natural").def(
        py::init([](size_t n, Array codes, Array base, uint32_t first, uint32_t second) {
            return Bound<Natural>{{part<uint8_t>(codes, n), part<uint8_t>(base, 1), {first, second}}, blocks_of(n, TILE),
                                  {codes, base}};
        }));
    bind<Bf16>(m, "Bf16").def(py::init([](size_t n, Array values) {
        return Bound<Bf16>{{part<int16_t>(values, n)}, blocks_of(n, TILE), {values}};
    }));
    bind<Fp16>(m, "Fp16").def(py::init([](size_t n, Array values, float by, float limit) {
        return Bound<Fp16>{{part<uint16_t>(values, n), by, limit}, blocks_of(n, TILE), {values}};
    }));

    m.def("select", [](Array grad, Maybe residual, float scale, MaybeMomentum momentum, Array indices, int threads) {
        const size_t n = length(grad), k = length(indices);
        require(k >= 1 && k <= n && n <= INT32_MAX, "k must be from 1 to the number of elements");
        const Source source = source_of(grad, residual, scale, momentum, n);
        int32_t* const out = write<int32_t>(indices, k);
        py::gil_scoped_release released;
        select(source, n, k, threads, out);
    }, "The indices of the largest magnitudes, ascending; ties to the lowest index.");

    m.def("encode_indices", [](Array indices, size_t n, Array high, Maybe low) {
        require(length(indices) >= 1 && length(indices) <= n && n <= INT32_MAX, "k must be from 1 to the number of elements");
        const IndexCode code(n, length(indices));
        const int32_t* const from = read<int32_t>(indices, code.k);
        check_indices(from, code.k, n);
        uint8_t* const highs = write<uint8_t>(high, code.high_nbytes());
        require(low.has_value() == (code.low > 0), "low bits");
        uint8_t* const lows = low ? write<uint8_t>(*low, code.low_nbytes()) : nullptr;
        py::gil_scoped_release released;
        for (size_t j = 1; j < code.k; ++j)
            if (from[j] <= from[j - 1]) throw std::out_of_range("indices must ascend");
        encode_indices(code, from, highs, lows);
    }, "The Elias-Fano code of ascending indices below n.");

    m.def("decode_indices", [](Array high, Maybe low, size_t n, size_t k) {
        require(k >= 1 && k <= n && n <= INT32_MAX, "k must be from 1 to the number of elements");
        const IndexCode code(n, k);
        const uint8_t* const highs = read<uint8_t>(high, code.high_nbytes());
        require(low.has_value() == (code.low > 0), "low bits");
        const uint8_t* const lows = low ? read<uint8_t>(*low, code.low_nbytes()) : nullptr;
        std::vector<int32_t> indices;
        {
            py::gil_scoped_release released;
            indices = decode_indices(code, highs, lows);
        }
        return py::array_t<int32_t>(static_cast<py::ssize_t>(k), indices.data());
    }, "k indices below n, or IndexError.");

    m.def("sample", [](size_t n, size_t k, uint32_t first, uint32_t second) {
        require(k >= 1 && k <= n && n <= INT32_MAX, "k must be from 1 to the number of elements");
        py::array_t<int32_t> places(static_cast<py::ssize_t>(k));
        sample({first, second}, n, k, places.mutable_data());
        return places;
    }, "k distinct positions below n, drawn at random.");

    m.def("gather", [](Array grad, Maybe residual, float scale, MaybeMomentum momentum, Array indices,
                       Array values) {
        const size_t n = length(grad), k = length(indices);
        const Source source = source_of(grad, residual, scale, momentum, n);
        float* const out = write<float>(values, k);
        const int32_t* const at = read<int32_t>(indices, k);
        check_indices(at, k, n);
        py::gil_scoped_release released;
        gather(source, at, k, out);
    }, "Values at indices.");

    m.def("scatter", [](Array target, Maybe grad, float scale, MaybeMomentum momentum, Array indices,
                        Array values, float by, int threads) {
        const size_t n = length(target), k = length(indices);
        const Sink sink = sink_of(target, grad, scale, momentum, n);
        const float* const from = read<float>(values, k);
        const int32_t* const at = read<int32_t>(indices, k);
        check_indices(at, k, n);
        py::gil_scoped_release released;
        scatter(sink, n, at, from, k, by, threads);
    }, "Values to indices: added to an accumulator, or settled into a residual. IndexError for an index outside.");

    m.def("divide_at", [](Array target, const std::vector<Array>& indices, float by) {
        const size_t n = length(target);
        float* const to = write<float>(target, n);
        std::vector<uint64_t> done(n / 64 + 1);
        for (const Array& each : indices) {
            const size_t k = length(each);
            const int32_t* const at = read<int32_t>(each, k);
            check_indices(at, k, n);
            for (size_t j = 0; j < k; ++j) {
                uint64_t& word = done[at[j] / 64];
                const uint64_t bit = uint64_t{1} << at[j] % 64;
                if (!(word & bit)) to[at[j]] /= by;
                word |= bit;
            }
        }
    }, "Divides what the indices name, each element once.");

    m.def("largest", [](Array grad, Maybe residual, float scale, MaybeMomentum momentum) {
        const size_t n = length(grad);
        const Source source = source_of(grad, residual, scale, momentum, n);
        py::gil_scoped_release released;
        return largest(source, n);
    }, "The largest magnitude; NaN if there is one.");

    m.def("rows_times", [](Array grad, Maybe residual, float scale, MaybeMomentum momentum, size_t rows, size_t columns,
                           Array q, size_t rank, Array out, int threads) {
        const Source source = source_of(grad, residual, scale, momentum, rows * columns);
        const float* const factor = read<float>(q, rank * columns);
        float* const to = write<float>(out, rows * rank);
        py::gil_scoped_release released;
        rows_times(source, rows, columns, factor, rank, to, threads);
    }, "[rows, rank]: the matrix times q^T, q [rank, columns].");

    m.def("columns_times", [](Array grad, Maybe residual, float scale, MaybeMomentum momentum, size_t rows, size_t columns,
                              Array p, size_t rank, Array out) {
        const Source source = source_of(grad, residual, scale, momentum, rows * columns);
        const float* const factor = read<float>(p, rank * rows);
        float* const to = write<float>(out, rank * columns);
        py::gil_scoped_release released;
        columns_times(source, rows, columns, factor, rank, to);
    }, "[rank, columns]: p^T times the matrix, p [rows, rank].");

    m.def("product", [](Array target, Maybe grad, float scale, MaybeMomentum momentum, size_t rows, size_t columns,
                        Array p, Array q, size_t rank, int threads) {
        const Sink sink = sink_of(target, grad, scale, momentum, rows * columns);
        const float *left = read<float>(p, rows * rank), *right = read<float>(q, rank * columns);
        py::gil_scoped_release released;
        product(sink, rows, columns, left, right, rank, threads);
    }, "p q into an accumulator or a residual, p [rows, rank], q [rank, columns].");
}
