// The codecs' arithmetic on the CPU: one pass over memory, vectorised by the compiler, bit-equal to the torch references.
//
// _cpu.py compiles this with -ffp-contract=off, because a fused multiply-add would round differently from the
// reference. Shapes and formulas are those of _symmetric.py, asymmetric_int4.py, fp8.py and bitmask.py.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

using std::int64_t;
using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

constexpr int64_t MAX_GROUP = 1024;  // _symmetric.GROUP_SIZES
constexpr int64_t TILE = 256;        // columns taken together by the channel-wise codec: 64 measured 1.4 times slower

template <class To, class From>
inline To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}

inline float from_bf16(u16 bits) { return bit_cast<float>(u32(bits) << 16); }

// One struct per dtype: the type of stored elements, the integer type of their bits (Key), conversions from and to
// float (load, save), and the conversion of a stored 16-bit peak to float.
struct F32 {
    using Stored = float;
    using Key = u32;
    static float load(float value) { return value; }
    static float save(float value) { return value; }
    static float peak(u16 bits) { return from_bf16(bits); }
};

struct BF16 {
    using Stored = u16;
    using Key = u16;
    static float load(u16 value) { return from_bf16(value); }
    static u16 save(float value) {  // to nearest even, as torch rounds
        const u32 bits = bit_cast<u32>(value);
        return value != value ? u16(0x7FC0) : u16((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
    }
    static float peak(u16 bits) { return from_bf16(bits); }
};

// Converted by integer arithmetic, because not all compilers that know _Float16 vectorise its conversions. The
// exponent's bias is 15 here and 127 in a float.
struct F16 {
    using Stored = u16;
    using Key = u16;
    static float load(u16 value) {
        const u32 sign = u32(value & 0x8000u) << 16;
        const u32 rest = u32(value & 0x7FFFu) << 13;
        const u32 finite = bit_cast<u32>(bit_cast<float>(rest) * 0x1p112f);  // exact, denormals too
        return bit_cast<float>(sign | (rest >= 0x7C00u << 13 ? rest | 0x7F800000u : finite));
    }
    static u16 save(float value) {  // to nearest even, as torch rounds
        const u32 sign = (bit_cast<u32>(value) >> 16) & 0x8000u;
        const u32 bits = bit_cast<u32>(value) & 0x7FFFFFFFu;
        const u32 normal = (bits - (112u << 23) + 0xFFFu + ((bits >> 13) & 1u)) >> 13;
        // One half has a last place of 2^-24, the step of half-precision denormals: the addition rounds to it.
        const u32 denormal = bit_cast<u32>(bit_cast<float>(bits) + 0.5f) - bit_cast<u32>(0.5f);
        const u32 small = bits < 113u << 23 ? denormal : normal;
        const u32 finite = std::min(small, 0x7C00u);
        return u16(sign | (bits > 0x7F800000u ? 0x7E00u : bits >= 0x7F800000u ? 0x7C00u : finite));
    }
    static float peak(u16 bits) { return load(bits); }
};

// Calls body(dtype) for a dtype given by its place in _cpu.DTYPES.
template <class Body>
void dispatch(int dtype, Body body) {
    if (dtype == 0) return body(F32{});
    if (dtype == 1) return body(BF16{});
    body(F16{});
}

// [Peaks] Integer key that sorts elements by magnitude: their bits with the sign moved to the lowest bit. NaN is the
// largest, and of two equal magnitudes the negative one. If `sign` is 0, the sign bit is dropped.
template <class Key>
inline Key magnitude_key(Key bits, Key sign) {
    return Key(Key(bits << 1) | (Key(bits >> (8 * sizeof(Key) - 1)) & sign));
}

template <class Key>
inline u16 peak_of(Key key) {
    constexpr int TOP = 8 * sizeof(Key) - 1;
    return u16(Key(Key(key >> 1) | Key(key << TOP)) >> (TOP - 15));
}

inline float inverse_of(float value, float factor) {
    const float magnitude = value < 0 ? -value : value;
    const bool usable = magnitude >= 0x1p-100f && magnitude <= 3.4028234663852886e38f;
    return usable ? 1.0f / (value * factor) : 0.0f;
}

// Calls body(k) for each k < count. The default group sizes have loops of constant length: otherwise 64 bfloat16
// elements take twice as long.
template <class Body>
inline void repeat(const int64_t count, Body body) {
    if (count == 64)
        for (int64_t k = 0; k < 64; ++k) body(k);
    else if (count == 128)
        for (int64_t k = 0; k < 128; ++k) body(k);
    else
        for (int64_t k = 0; k < count; ++k) body(k);
}

inline int clip(float shifted, int low, int high) { return std::min(std::max(int(shifted), low), high); }

// A flat tensor in groups. Row p of four-bit codes has group p in the low bits, and group p + rows in the high bits.
// Row p of eight-bit codes has group p.
struct Groups {
    int64_t numel, size, rows;
    const void* keep;  // per channel all ones, or 0 for an outlier, repeated to channels + size entries; or null
    int64_t channels;
    float factor;
    u32 sign;
    int threads;
};

template <class T>
void clear_outliers(const typename T::Stored* __restrict x, const typename T::Key* __restrict keep,
                    typename T::Stored* __restrict out, const int64_t count) {
    using Key = typename T::Key;
    for (int64_t k = 0; k < count; ++k) out[k] = bit_cast<typename T::Stored>(Key(bit_cast<Key>(x[k]) & keep[k]));
}

// Returns the elements of a group. If outliers must be cleared, or the tensor ends inside the group, they are copied to
// `buffer` and padded with `pad`.
template <class T>
const typename T::Stored* group_of(const typename T::Stored* x, const Groups& a, int64_t group,
                                   typename T::Stored* buffer, typename T::Stored pad) {
    using Key = typename T::Key;
    const int64_t first = group * a.size;
    const int64_t there = std::min(a.size, std::max<int64_t>(a.numel - first, 0));
    if (there == a.size && !a.keep) return x + first;
    std::fill(buffer + there, buffer + a.size, pad);
    if (a.keep)
        clear_outliers<T>(x + first, static_cast<const Key*>(a.keep) + first % a.channels, buffer, there);
    else
        std::copy(x + first, x + first + there, buffer);
    return buffer;
}

template <class T>
u16 peak_in(const typename T::Stored* x, int64_t count, u32 sign) {
    using Key = typename T::Key;
    Key key = 0;
    repeat(count, [&](int64_t k) { key = std::max(key, magnitude_key<Key>(bit_cast<Key>(x[k]), Key(sign))); });
    return peak_of(key);
}

// Half the offset (0 for the symmetric codecs) and the reciprocal scale of one group.
struct Group {
    float offset, inverse;
};

template <class T, bool OFFSET>
inline int code_of(typename T::Stored x, const Group g, float zero, int least, int most) {
    const float centred = OFFSET ? T::load(x) * 0.5f - g.offset : T::load(x);
    return clip(centred * g.inverse + (0.5f + zero), least, most);
}

// One loop over two groups: writing the low halves of the bytes first and the high ones later takes 1.4 times as long.
template <class T, bool OFFSET>
void write_pair(const typename T::Stored* __restrict low, const typename T::Stored* __restrict high,
                u8* __restrict out, const int64_t count, const Group l, const Group h, const float zero) {
    repeat(count, [=](int64_t k) {
        const int code = code_of<T, OFFSET>(low[k], l, zero, 0, 15);
        out[k] = u8(code | code_of<T, OFFSET>(high[k], h, zero, 0, 15) << 4);
    });
}

template <class T>
void write_bytes(const typename T::Stored* __restrict x, u8* __restrict out, const int64_t count, const Group g) {
    repeat(count, [=](int64_t k) { out[k] = u8(code_of<T, false>(x[k], g, 128.0f, 1, 255)); });
}

template <class T>
void encode_symmetric(const void* values, u8* codes, u16* peaks, int bits, const Groups a) {
    const auto* x = static_cast<const typename T::Stored*>(values);
#pragma omp parallel for num_threads(a.threads) schedule(static)
    for (int64_t p = 0; p < a.rows; ++p) {
        typename T::Stored buffers[2][MAX_GROUP];
        auto prepare = [&](int64_t group, auto* buffer, Group& steps) {
            const auto* elements = group_of<T>(x, a, group, buffer, 0);
            peaks[group] = peak_in<T>(elements, a.size, a.sign);
            steps = {0.0f, inverse_of(T::peak(peaks[group]), a.factor)};
            return elements;
        };
        Group low_steps, high_steps;
        const auto* low = prepare(p, buffers[0], low_steps);
        if (bits == 8) {
            write_bytes<T>(low, codes + p * a.size, a.size, low_steps);
            continue;
        }
        const auto* high = prepare(p + a.rows, buffers[1], high_steps);
        write_pair<T, false>(low, high, codes + p * a.size, a.size, low_steps, high_steps, 8.0f);
    }
}

// Decodes the elements of one group, from the four bits at SHIFT or from eight bits.
template <class T, int SHIFT, int MASK>
void read_codes(typename T::Stored* __restrict out, const u8* __restrict codes, const int64_t count, const float scale,
                const float offset, const float unit, const float zero) {
    for (int64_t k = 0; k < count; ++k) {
        const float steps = float((codes[k] >> SHIFT) & MASK) - zero;
        out[k] = T::save((steps * scale + offset) * unit);
    }
}

template <class T>
void decode_symmetric(void* values, const u8* codes, const u16* peaks, int bits, const Groups a) {
    auto* out = static_cast<typename T::Stored*>(values);
    const float none = -0.0f;  // leaves every sum as it is, the sign of a zero included
#pragma omp parallel for num_threads(a.threads) schedule(static)
    for (int64_t p = 0; p < a.rows; ++p) {
        const u8* row = codes + p * a.size;
        const int64_t low = p * a.size, high = low + a.rows * a.size;
        const float scale = T::peak(peaks[p]) * a.factor;
        if (bits == 8) {
            read_codes<T, 0, 255>(out + low, row, std::min(a.size, a.numel - low), scale, none, 1.0f, 128.0f);
            continue;
        }
        read_codes<T, 0, 15>(out + low, row, std::min(a.size, a.numel - low), scale, none, 1.0f, 8.0f);
        const float high_scale = T::peak(peaks[p + a.rows]) * a.factor;
        read_codes<T, 4, 15>(out + high, row, std::min(a.size, a.numel - high), high_scale, none, 1.0f, 8.0f);
    }
}

// [Outliers] Copies the raw channels from x [rows, channels] to kept [rows, count], or back.
template <class Pattern>
void copy_channels(Pattern* __restrict x, Pattern* __restrict kept, const int* __restrict indices, int64_t rows,
                   int64_t channels, int64_t count, bool gather, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t k = 0; k < count; ++k) {
            Pattern& inside = x[row * channels + indices[k]];
            Pattern& outside = kept[row * count + k];
            gather ? outside = inside : inside = outside;
        }
}

// [Asymmetric] Finds the smallest and the largest element by signed integers in the order of the floats: for negative
// elements, all bits but the sign are flipped.
template <class T>
void range_of(const typename T::Stored* x, int64_t count, float& low, float& high) {
    using Order = std::make_signed_t<typename T::Key>;
    constexpr Order MOST = Order(~(u64(1) << (8 * sizeof(Order) - 1)));
    constexpr int TOP = 8 * sizeof(Order) - 1;
    Order least = MOST, most = Order(~MOST);
    repeat(count, [&](int64_t k) {
        const Order bits = bit_cast<Order>(x[k]);
        const Order order = Order(bits ^ (Order(bits >> TOP) & MOST));
        least = std::min(least, order);
        most = std::max(most, order);
    });
    low = T::load(bit_cast<typename T::Stored>(Order(least ^ (Order(least >> TOP) & MOST))));
    high = T::load(bit_cast<typename T::Stored>(Order(most ^ (Order(most >> TOP) & MOST))));
}

template <class T>
void encode_asymmetric(const void* values, u8* codes, void* stored_offsets, u16* half_ranges, const Groups a) {
    const auto* x = static_cast<const typename T::Stored*>(values);
    auto* offsets = static_cast<typename T::Stored*>(stored_offsets);
#pragma omp parallel for num_threads(a.threads) schedule(static)
    for (int64_t p = 0; p < a.rows; ++p) {
        typename T::Stored buffers[2][MAX_GROUP];
        auto prepare = [&](int64_t group, auto* buffer, Group& steps) {
            const auto* elements = group_of<T>(x, a, group, buffer, x[a.numel - 1]);
            float low, high;
            range_of<T>(elements, a.size, low, high);
            half_ranges[group] = u16(bit_cast<u32>(high * 0.5f - low * 0.5f) >> 16);
            offsets[group] = T::save(low);
            const float inverse = inverse_of(from_bf16(half_ranges[group]), a.factor);
            steps = {low * 0.5f, inverse};
            return elements;
        };
        Group low_steps, high_steps;
        const auto* low = prepare(p, buffers[0], low_steps);
        const auto* high = prepare(p + a.rows, buffers[1], high_steps);
        write_pair<T, true>(low, high, codes + p * a.size, a.size, low_steps, high_steps, 0.0f);
    }
}

template <class T>
void decode_asymmetric(void* values, const u8* codes, const void* stored_offsets, const u16* half_ranges,
                       const Groups a) {
    auto* out = static_cast<typename T::Stored*>(values);
    const auto* offsets = static_cast<const typename T::Stored*>(stored_offsets);
#pragma omp parallel for num_threads(a.threads) schedule(static)
    for (int64_t p = 0; p < a.rows; ++p) {
        const int64_t q = p + a.rows, low = p * a.size, high = q * a.size;
        const u8* row = codes + low;
        read_codes<T, 0, 15>(out + low, row, std::min(a.size, a.numel - low), from_bf16(half_ranges[p]) * a.factor,
                             T::load(offsets[p]) * 0.5f, 2.0f, 0.0f);
        read_codes<T, 4, 15>(out + high, row, std::min(a.size, a.numel - high), from_bf16(half_ranges[q]) * a.factor,
                             T::load(offsets[q]) * 0.5f, 2.0f, 0.0f);
    }
}

// [Channel-wise] x is [rows, columns]; a group is `size` rows of one column; missing rows count as zeros.
struct Columns {
    int64_t rows, columns, size, pairs;
    float factor;
    int threads;
};

template <class Key, class Stored>
void merge_keys(Key* __restrict keys, const Stored* __restrict row, const int64_t count) {
    for (int64_t k = 0; k < count; ++k) keys[k] = std::max(keys[k], magnitude_key<Key>(bit_cast<Key>(row[k]), 1));
}

template <class T, bool HIGH>
void write_row(const typename T::Stored* __restrict row, const float* __restrict inverses, u8* __restrict out,
               const int64_t count) {
    for (int64_t k = 0; k < count; ++k) {
        const int code = clip(T::load(row[k]) * inverses[k] + 8.5f, 0, 15);
        out[k] = HIGH ? u8(out[k] | code << 4) : u8(code);
    }
}

template <class T>
void encode_columns(const void* values, u8* codes, u16* peaks, const Columns a) {
    const auto* x = static_cast<const typename T::Stored*>(values);
    using Key = typename T::Key;
    static const typename T::Stored zeros[TILE] = {};
#pragma omp parallel for collapse(2) num_threads(a.threads) schedule(static)
    for (int64_t p = 0; p < a.pairs; ++p)
        for (int64_t c = 0; c < a.columns; c += TILE) {
            const int64_t width = std::min(TILE, a.columns - c);
            for (int part = 0; part < 2; ++part) {
                const int64_t group = p + part * a.pairs;
                auto row_of = [&](int64_t g) {
                    const int64_t row = group * a.size + g;
                    return row < a.rows ? x + row * a.columns + c : zeros;
                };
                Key keys[TILE] = {};
                float inverses[TILE];
                for (int64_t g = 0; g < a.size; ++g) merge_keys<Key>(keys, row_of(g), width);
                for (int64_t k = 0; k < width; ++k) {
                    const u16 peak = peaks[group * a.columns + c + k] = peak_of(keys[k]);
                    inverses[k] = inverse_of(T::peak(peak), a.factor);
                }
                for (int64_t g = 0; g < a.size; ++g) {
                    u8* out = codes + (p * a.size + g) * a.columns + c;
                    if (part)
                        write_row<T, true>(row_of(g), inverses, out, width);
                    else
                        write_row<T, false>(row_of(g), inverses, out, width);
                }
            }
        }
}

template <class T>
void read_row(typename T::Stored* __restrict out, const u8* __restrict codes, const u16* __restrict peaks,
              const int64_t count, const int shift, const float factor) {
    for (int64_t k = 0; k < count; ++k) {
        const float steps = float((codes[k] >> shift) & 15) - 8.0f;
        out[k] = T::save(steps * (T::peak(peaks[k]) * factor));
    }
}

template <class T>
void decode_columns(void* values, const u8* codes, const u16* peaks, const Columns a) {
    auto* out = static_cast<typename T::Stored*>(values);
#pragma omp parallel for num_threads(a.threads) schedule(static)
    for (int64_t row = 0; row < a.rows; ++row) {
        const int64_t group = row / a.size;
        const int shift = group < a.pairs ? 0 : 4;
        const u8* code = codes + (row - (shift ? a.pairs * a.size : 0)) * a.columns;
        read_row<T>(out + row * a.columns, code, peaks + group * a.columns, a.columns, shift, a.factor);
    }
}

// [FP8] x and the codes are [rows, columns]; a group is `size` elements of one row, or what is left of the row.
struct RowGroups {
    int64_t rows, columns, size;
    float factor;
    int threads;
};

// Calls body(group, index of its first element, number of its elements) for all groups.
template <class Body>
void each_group(const RowGroups a, Body body) {
    const int64_t per_row = (a.columns + a.size - 1) / a.size;
#pragma omp parallel for num_threads(a.threads) schedule(static)
    for (int64_t group = 0; group < a.rows * per_row; ++group) {
        const int64_t row = group / per_row, column = (group - row * per_row) * a.size;
        body(group, row * a.columns + column, std::min(a.size, a.columns - column));
    }
}

// Converts a scaled element to an E4M3 code, as fp8.codes_ref does with the same variable names.
inline u8 fp8_code(float scaled) {
    const u32 bits = bit_cast<u32>(scaled);
    const int above = std::max(int(bits & 0x7F800000u) - (121 << 23), 0);
    const float steps = bit_cast<float>(bits & 0x7FFFFFFFu) * bit_cast<float>((136 << 23) - above);
    // Adding 2^23, whose last place is 1, rounds a number to nearest even.
    const int whole = bit_cast<int>(steps + 0x1p23f) - bit_cast<int>(0x1p23f);
    return u8(std::min((above >> 20) + whole, 126) | int((bits >> 24) & 128u));
}

template <class T>
void write_fp8(const typename T::Stored* __restrict x, u8* __restrict codes, const int64_t count, const float inverse) {
    repeat(count, [=](int64_t k) { codes[k] = fp8_code(T::load(x[k]) * inverse); });
}

template <class T>
void encode_fp8(const void* values, u8* codes, u16* peaks, const RowGroups a) {
    const auto* x = static_cast<const typename T::Stored*>(values);
    each_group(a, [=](int64_t group, int64_t first, int64_t count) {
        peaks[group] = peak_in<T>(x + first, count, 0);
        const float inverse = inverse_of(T::peak(peaks[group]), a.factor);
        write_fp8<T>(x + first, codes + first, count, inverse);
    });
}

// Converts an E4M3 code to float without denormal intermediate results, on which a processor is a hundred times slower.
inline float fp8_number(u8 code) {
    const u32 magnitude = code & 127u;
    const float normal = bit_cast<float>((magnitude << 20) + (120u << 23));
    const float small = bit_cast<float>((magnitude << 20) + (121u << 23)) - 0x1p-6f;
    return bit_cast<float>(bit_cast<u32>(magnitude < 8 ? small : normal) | u32(code & 128u) << 24);
}

template <class T>
void read_fp8(typename T::Stored* __restrict out, const u8* __restrict codes, const int64_t count, const float scale) {
    repeat(count, [=](int64_t k) { out[k] = T::save(fp8_number(codes[k]) * scale); });
}

template <class T>
void decode_fp8(void* values, const u8* codes, const u16* peaks, const RowGroups a) {
    auto* out = static_cast<typename T::Stored*>(values);
    each_group(a, [=](int64_t group, int64_t first, int64_t count) {
        read_fp8<T>(out + first, codes + first, count, T::peak(peaks[group]) * a.factor);
    });
}

// [Bitmask] Bit j of byte k is element k + j * num_bytes. All nonzero elements have the same bit pattern, so the OR of
// all elements is this pattern.
constexpr int64_t BLOCK = 4096;

template <class Pattern>
void pack_bits(const Pattern* x, u8* packed, Pattern* pattern, int64_t numel, int64_t num_bytes, int threads) {
    Pattern any = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(| : any)
    for (int64_t first = 0; first < num_bytes; first += BLOCK) {
        u8 block[BLOCK] = {};
        for (int j = 0; j < 8; ++j) {
            const Pattern* part = x + j * num_bytes + first;
            const int64_t there = std::min({BLOCK, num_bytes - first, numel - j * num_bytes - first});
            for (int64_t k = 0; k < there; ++k) {
                block[k] = u8(block[k] | u8(part[k] != 0) << j);
                any |= part[k];
            }
        }
        std::copy(block, block + std::min(BLOCK, num_bytes - first), packed + first);
    }
    if (pattern) *pattern = any;
}

template <class Pattern>
void unpack_bits(Pattern* out, const u8* packed, Pattern pattern, int64_t numel, int64_t num_bytes, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < num_bytes; first += BLOCK)
        for (int j = 0; j < 8; ++j) {
            Pattern* part = out + j * num_bytes + first;
            const int64_t there = std::min({BLOCK, num_bytes - first, numel - j * num_bytes - first});
            for (int64_t k = 0; k < there; ++k) part[k] = Pattern(Pattern((packed[first + k] >> j) & 1) * pattern);
        }
}

template <class Body>
void dispatch_width(int itemsize, Body body) {
    if (itemsize == 1) return body(u8{});
    if (itemsize == 2) return body(u16{});
    if (itemsize == 4) return body(u32{});
    body(u64{});
}

}  // namespace

// Every pointer is to contiguous memory of the shape given in the Python wrapper of the same name in _cpu.py.
extern "C" {

void adacc_encode_groups(const void* x, u8* codes, u16* peaks, const void* keep, int64_t numel, int64_t size, int64_t rows,
                         int64_t channels, int dtype, int bits, float factor, int with_sign, int threads) {
    const Groups a{numel, size, rows, keep, channels, factor, u32(with_sign), threads};
    dispatch(dtype, [&](auto type) { encode_symmetric<decltype(type)>(x, codes, peaks, bits, a); });
}

void adacc_decode_groups(void* out, const u8* codes, const u16* peaks, int64_t numel, int64_t size, int64_t rows,
                         int dtype, int bits, float factor, int threads) {
    const Groups a{numel, size, rows, nullptr, 1, factor, 0, threads};
    dispatch(dtype, [&](auto type) { decode_symmetric<decltype(type)>(out, codes, peaks, bits, a); });
}

void adacc_copy_channels(void* x, void* kept, const int* indices, int64_t rows, int64_t channels, int64_t count,
                         int itemsize, int gather, int threads) {
    dispatch_width(itemsize, [&](auto width) {
        using P = decltype(width);
        copy_channels<P>(static_cast<P*>(x), static_cast<P*>(kept), indices, rows, channels, count, gather, threads);
    });
}

void adacc_encode_asymmetric(const void* x, u8* codes, void* offsets, u16* half_ranges, int64_t numel, int64_t size,
                             int64_t rows, int dtype, float factor, int threads) {
    const Groups a{numel, size, rows, nullptr, 1, factor, 0, threads};
    dispatch(dtype, [&](auto type) { encode_asymmetric<decltype(type)>(x, codes, offsets, half_ranges, a); });
}

void adacc_decode_asymmetric(void* out, const u8* codes, const void* offsets, const u16* half_ranges, int64_t numel,
                             int64_t size, int64_t rows, int dtype, float factor, int threads) {
    const Groups a{numel, size, rows, nullptr, 1, factor, 0, threads};
    dispatch(dtype, [&](auto type) { decode_asymmetric<decltype(type)>(out, codes, offsets, half_ranges, a); });
}

void adacc_encode_columns(const void* x, u8* codes, u16* peaks, int64_t rows, int64_t columns, int64_t size,
                          int64_t pairs, int dtype, float factor, int threads) {
    const Columns a{rows, columns, size, pairs, factor, threads};
    dispatch(dtype, [&](auto type) { encode_columns<decltype(type)>(x, codes, peaks, a); });
}

void adacc_decode_columns(void* out, const u8* codes, const u16* peaks, int64_t rows, int64_t columns, int64_t size,
                          int64_t pairs, int dtype, float factor, int threads) {
    const Columns a{rows, columns, size, pairs, factor, threads};
    dispatch(dtype, [&](auto type) { decode_columns<decltype(type)>(out, codes, peaks, a); });
}

void adacc_encode_fp8(const void* x, u8* codes, u16* peaks, int64_t rows, int64_t columns, int64_t size, int dtype,
                      float factor, int threads) {
    const RowGroups a{rows, columns, size, factor, threads};
    dispatch(dtype, [&](auto type) { encode_fp8<decltype(type)>(x, codes, peaks, a); });
}

void adacc_decode_fp8(void* out, const u8* codes, const u16* peaks, int64_t rows, int64_t columns, int64_t size,
                      int dtype, float factor, int threads) {
    const RowGroups a{rows, columns, size, factor, threads};
    dispatch(dtype, [&](auto type) { decode_fp8<decltype(type)>(out, codes, peaks, a); });
}

void adacc_pack_bits(const void* x, u8* packed, void* pattern, int64_t numel, int64_t num_bytes, int itemsize,
                     int threads) {
    dispatch_width(itemsize, [&](auto width) {
        using P = decltype(width);
        pack_bits<P>(static_cast<const P*>(x), packed, static_cast<P*>(pattern), numel, num_bytes, threads);
    });
}

void adacc_unpack_bits(void* out, const u8* packed, const void* pattern, int64_t numel, int64_t num_bytes,
                       int itemsize, int threads) {
    dispatch_width(itemsize, [&](auto width) {
        using P = decltype(width);
        const P value = pattern ? *static_cast<const P*>(pattern) : P(1);
        unpack_bits<P>(static_cast<P*>(out), packed, value, numel, num_bytes, threads);
    });
}
}
