/* Kernels that numpy needs several passes for. Each has a form in numpy that gives the same bytes, and is used
   where this file was not compiled: see fastcheck_codecs/native.py, which is also where they are described. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__gnu_linux__)
#define VECTORIZED __attribute__((target_clones("avx2", "default"), optimize("O3")))
#else
#define VECTORIZED
#endif

#define GROUP 16

/* Tell which of 16 bytes are equal to `wanted`: bit j for byte j. */
#if defined(__SSE2__)
#include <emmintrin.h>

static inline uint32_t equal(const uint8_t *bytes, uint8_t wanted) {
    __m128i group = _mm_loadu_si128((const __m128i *)bytes);
    return (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(group, _mm_set1_epi8((char)wanted)));
}
#else
static inline uint32_t equal(const uint8_t *bytes, uint8_t wanted) {
    uint32_t found = 0;
    for (int i = 0; i < GROUP; i++) found |= (uint32_t)(bytes[i] == wanted) << i;
    return found;
}
#endif

#if defined(__GNUC__)
#define lowest_bit(bits) __builtin_ctz(bits)
#else
static inline int lowest_bit(uint32_t bits) {
    int place = 0;
    while (!(bits >> place & 1)) place++;
    return place;
}
#endif

#define ARGUMENTS_MAX 5

typedef struct {
    Py_buffer view[ARGUMENTS_MAX];
    int count;
} Buffers;

static void release(Buffers *buffers) {
    while (buffers->count > 0) PyBuffer_Release(&buffers->view[--buffers->count]);
}

/* Take `count` contiguous buffers from the arguments; those whose bit is set in `written` are writable. */
static int take(Buffers *buffers, PyObject *args, int count, unsigned written) {
    buffers->count = 0;
    for (int i = 0; i < count; i++) {
        PyObject *object = PyTuple_GetItem(args, i);
        int flags = PyBUF_C_CONTIGUOUS | ((written >> i & 1) ? PyBUF_WRITABLE : 0);
        if (object == NULL || PyObject_GetBuffer(object, &buffers->view[i], flags) < 0) {
            release(buffers);
            return -1;
        }
        buffers->count++;
    }
    return 0;
}

static PyObject *refuse(Buffers *buffers, const char *message) {
    release(buffers);
    PyErr_SetString(PyExc_ValueError, message);
    return NULL;
}

static PyObject *finish(Buffers *buffers, Py_ssize_t result) {
    release(buffers);
    return PyLong_FromSsize_t(result);
}

VECTORIZED static void split4(const uint32_t *restrict words, Py_ssize_t n, uint16_t *restrict low,
                              uint8_t *restrict rest, uint8_t *restrict exponents) {
    for (Py_ssize_t i = 0; i < n; i++) {
        uint32_t word = words[i];
        low[i] = (uint16_t)word;
        rest[i] = (uint8_t)(word >> 15 & 0xFE) | (uint8_t)(word >> 31);
        exponents[i] = (uint8_t)(word >> 23);
    }
}

VECTORIZED static void split2(const uint16_t *restrict words, Py_ssize_t n, uint8_t *restrict rest,
                              uint8_t *restrict exponents) {
    for (Py_ssize_t i = 0; i < n; i++) {
        uint16_t word = words[i];
        rest[i] = (uint8_t)(word << 1) | (uint8_t)(word >> 15);
        exponents[i] = (uint8_t)(word >> 7);
    }
}

/* split(words, low, rest, exponents): low is empty where words have 2 bytes. */
static PyObject *split(PyObject *self, PyObject *args) {
    Buffers b;
    if (take(&b, args, 4, 14) < 0) return NULL;
    Py_ssize_t n = b.view[3].len, width = b.view[1].len ? 4 : 2;
    if (b.view[0].len != n * width || b.view[1].len != n * (width - 2) || b.view[2].len != n)
        return refuse(&b, "split: sizes do not fit");
    if ((uintptr_t)b.view[0].buf % (size_t)width || (uintptr_t)b.view[1].buf % 2)
        return refuse(&b, "split: not aligned");
    Py_BEGIN_ALLOW_THREADS
    if (width == 4)
        split4(b.view[0].buf, n, b.view[1].buf, b.view[2].buf, b.view[3].buf);
    else
        split2(b.view[0].buf, n, b.view[2].buf, b.view[3].buf);
    Py_END_ALLOW_THREADS
    return finish(&b, n);
}

VECTORIZED static void join4(const uint16_t *restrict low, const uint8_t *restrict rest,
                             const uint8_t *restrict distances, uint8_t reference, Py_ssize_t n,
                             uint32_t *restrict words) {
    for (Py_ssize_t i = 0; i < n; i++) {
        uint32_t exponent = (uint8_t)(reference - distances[i]), other = rest[i];
        words[i] = low[i] | (other >> 1) << 16 | exponent << 23 | other << 31;
    }
}

VECTORIZED static void join2(const uint8_t *restrict rest, const uint8_t *restrict distances, uint8_t reference,
                             Py_ssize_t n, uint16_t *restrict words) {
    for (Py_ssize_t i = 0; i < n; i++) {
        uint32_t exponent = (uint8_t)(reference - distances[i]), other = rest[i];
        words[i] = (uint16_t)(other >> 1 | exponent << 7 | other << 15);
    }
}

#define ROW 1024

/* join(low, rest, distances, references, words): undo split, and the subtraction from the references. */
static PyObject *join(PyObject *self, PyObject *args) {
    Buffers b;
    if (take(&b, args, 5, 16) < 0) return NULL;
    Py_ssize_t n = b.view[1].len, width = b.view[0].len ? 4 : 2;
    if (b.view[4].len != n * width || b.view[0].len != n * (width - 2) || b.view[2].len != n ||
        b.view[3].len != (n + ROW - 1) / ROW)
        return refuse(&b, "join: sizes do not fit");
    if ((uintptr_t)b.view[4].buf % (size_t)width || (uintptr_t)b.view[0].buf % 2)
        return refuse(&b, "join: not aligned");
    const uint16_t *low = b.view[0].buf;
    const uint8_t *rest = b.view[1].buf, *distances = b.view[2].buf, *references = b.view[3].buf;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < n; at += ROW) {
        Py_ssize_t row = n - at < ROW ? n - at : ROW;
        uint8_t reference = references[at / ROW];
        if (width == 4)
            join4(low + at, rest + at, distances + at, reference, row, (uint32_t *)b.view[4].buf + at);
        else
            join2(rest + at, distances + at, reference, row, (uint16_t *)b.view[4].buf + at);
    }
    Py_END_ALLOW_THREADS
    return finish(&b, n);
}

/* Mean of those of every `step`-th exponent that are not 0, rounded down, and `above` added. */
static uint8_t reference_of(const uint8_t *exponents, Py_ssize_t n, int step, long above) {
    uint32_t sum = 0, filled = 0;
    for (Py_ssize_t i = 0; i < n; i += step) {
        sum += exponents[i];
        filled += exponents[i] != 0;
    }
    return (uint8_t)(sum / (filled ? filled : 1) + (uint32_t)above);
}

/* references(exponents, out, step, above): of each row; a row that is not full is looked at whole. */
static PyObject *references(PyObject *self, PyObject *args) {
    Buffers b;
    long step = PyLong_AsLong(PyTuple_GetItem(args, 2)), above = PyLong_AsLong(PyTuple_GetItem(args, 3));
    if (PyErr_Occurred() || take(&b, args, 2, 2) < 0) return NULL;
    Py_ssize_t n = b.view[0].len;
    if (b.view[1].len != (n + ROW - 1) / ROW || step < 1) return refuse(&b, "references: sizes do not fit");
    const uint8_t *exponents = b.view[0].buf;
    uint8_t *out = b.view[1].buf;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < n; at += ROW)
        out[at / ROW] = n - at < ROW ? reference_of(exponents + at, n - at, 1, above)
                                     : reference_of(exponents + at, ROW, (int)step, above);
    Py_END_ALLOW_THREADS
    return finish(&b, n);
}

/* Limit codes to the escape. */
VECTORIZED static void limit(const uint8_t *restrict plane, Py_ssize_t n, uint8_t lowest, uint8_t escape,
                             uint8_t *restrict codes) {
    for (Py_ssize_t i = 0; i < n; i++) {
        uint8_t code = (uint8_t)(plane[i] - lowest);
        codes[i] = code < escape ? code : escape;
    }
}

VECTORIZED static void merge(const uint8_t *restrict codes, Py_ssize_t n, int shift, uint8_t *restrict packed) {
    if (shift == 0)
        memcpy(packed, codes, (size_t)n);
    else
        for (Py_ssize_t i = 0; i < n; i++) packed[i] |= (uint8_t)(codes[i] << shift);
}

#define TILE 4096

/* pack(plane, packed, escaped, lowest, width): return the count of escapes. */
static PyObject *pack(PyObject *self, PyObject *args) {
    Buffers b;
    long lowest = PyLong_AsLong(PyTuple_GetItem(args, 3)), width = PyLong_AsLong(PyTuple_GetItem(args, 4));
    if (PyErr_Occurred() || take(&b, args, 3, 6) < 0) return NULL;
    Py_ssize_t n = b.view[0].len, size = b.view[1].len, found = 0;
    if ((width != 2 && width != 4) || size < (n * width + 7) / 8 || b.view[2].len < n)
        return refuse(&b, "pack: sizes do not fit");
    const uint8_t *plane = b.view[0].buf;
    uint8_t *packed = b.view[1].buf, *escaped = b.view[2].buf, codes[TILE + GROUP];
    uint8_t escape = (uint8_t)((1 << width) - 1);
    Py_BEGIN_ALLOW_THREADS
    for (int place = 0; place < 8 / width; place++)
        for (Py_ssize_t at = 0; at < size; at += TILE) {
            Py_ssize_t start = place * size + at, count = size - at < TILE ? size - at : TILE;
            Py_ssize_t here = n - start < 0 ? 0 : n - start < count ? n - start : count;
            limit(plane + (here ? start : 0), here, (uint8_t)lowest, escape, codes);
            memset(codes + here, 0, (size_t)(count - here) + GROUP);
            merge(codes, count, place * (int)width, packed + at);
            for (Py_ssize_t i = 0; i < here; i += GROUP)
                for (uint32_t bits = equal(codes + i, escape); bits; bits &= bits - 1)
                    escaped[found++] = plane[start + i + lowest_bit(bits)];
        }
    Py_END_ALLOW_THREADS
    return finish(&b, found);
}

VECTORIZED static void spread(const uint8_t *restrict packed, Py_ssize_t n, int shift, uint8_t escape,
                              uint8_t lowest, uint8_t *restrict plane) {
    for (Py_ssize_t i = 0; i < n; i++) plane[i] = (uint8_t)(((packed[i] >> shift) & escape) + lowest);
}

/* unpack(packed, escaped, plane, lowest, width): return the count of escapes, of which only so many as
   there are were put in. */
static PyObject *unpack(PyObject *self, PyObject *args) {
    Buffers b;
    long lowest = PyLong_AsLong(PyTuple_GetItem(args, 3)), width = PyLong_AsLong(PyTuple_GetItem(args, 4));
    if (PyErr_Occurred() || take(&b, args, 3, 4) < 0) return NULL;
    Py_ssize_t n = b.view[2].len, size = b.view[0].len, known = b.view[1].len, found = 0;
    if ((width != 2 && width != 4) || size < (n * width + 7) / 8) return refuse(&b, "unpack: sizes do not fit");
    const uint8_t *packed = b.view[0].buf, *escaped = b.view[1].buf;
    uint8_t *plane = b.view[2].buf, escape = (uint8_t)((1 << width) - 1);
    uint8_t marked = (uint8_t)(escape + lowest);
    Py_BEGIN_ALLOW_THREADS
    for (int place = 0; place < 8 / width; place++) {
        Py_ssize_t start = place * size, count = n - start < 0 ? 0 : n - start < size ? n - start : size;
        for (Py_ssize_t at = 0; at < count; at += TILE) {
            uint8_t *part = plane + start + at;
            Py_ssize_t here = count - at < TILE ? count - at : TILE, i = 0;
            spread(packed + at, here, place * (int)width, escape, (uint8_t)lowest, part);
            for (; i + GROUP <= here; i += GROUP)
                for (uint32_t bits = equal(part + i, marked); bits; bits &= bits - 1, found++)
                    if (found < known) part[i + lowest_bit(bits)] = escaped[found];
            for (; i < here; i++)
                if (part[i] == marked) {
                    if (found < known) part[i] = escaped[found];
                    found++;
                }
        }
    }
    Py_END_ALLOW_THREADS
    return finish(&b, found);
}

#define REACH 256

typedef struct {
    uint8_t *gaps, *values;
    Py_ssize_t room, count, last;
} List;

/* Say whether it fitted. */
static inline int append(List *list, Py_ssize_t at, uint8_t value) {
    Py_ssize_t gap = at - list->last - 1;
    if (list->count + gap / REACH >= list->room) return 0;
    for (; gap >= REACH; gap -= REACH) {
        list->gaps[list->count] = REACH - 1;
        list->values[list->count++] = 0;
    }
    list->gaps[list->count] = (uint8_t)gap;
    list->values[list->count++] = value;
    list->last = at;
    return 1;
}

/* list_filled(plane, gaps, values): the bytes other than zero, and the zeros before each; return their
   count, or -1 where there are more than fit. */
static PyObject *list_filled(PyObject *self, PyObject *args) {
    Buffers b;
    if (take(&b, args, 3, 6) < 0) return NULL;
    Py_ssize_t n = b.view[0].len, i = 0;
    List list = {b.view[1].buf, b.view[2].buf, b.view[1].len, 0, -1};
    if (b.view[2].len != list.room) return refuse(&b, "list_filled: sizes do not fit");
    const uint8_t *plane = b.view[0].buf;
    int fits = 1;
    Py_BEGIN_ALLOW_THREADS
    for (; fits && i + GROUP <= n; i += GROUP)
        for (uint32_t bits = ~equal(plane + i, 0) & 0xFFFF; fits && bits; bits &= bits - 1) {
            Py_ssize_t at = i + lowest_bit(bits);
            fits = append(&list, at, plane[at]);
        }
    for (; fits && i < n; i++)
        if (plane[i]) fits = append(&list, i, plane[i]);
    Py_END_ALLOW_THREADS
    return finish(&b, fits ? list.count : -1);
}

#define GATHER(name, type)                                                                             \
    static Py_ssize_t name(const type *restrict words, Py_ssize_t n, uint8_t *restrict bits,           \
                           type *restrict dense) {                                                     \
        Py_ssize_t kept = 0;                                                                           \
        for (Py_ssize_t at = 0; at < n; at += 8) {                                                     \
            int count = n - at < 8 ? (int)(n - at) : 8, byte = 0;                                      \
            for (int j = 0; j < count; j++) {                                                          \
                type word = words[at + j];                                                             \
                dense[kept] = word;                                                                    \
                kept += word != 0;                                                                     \
                byte |= (word != 0) << j;                                                              \
            }                                                                                          \
            bits[at / 8] = (uint8_t)byte;                                                              \
        }                                                                                              \
        return kept;                                                                                   \
    }

#define SCATTER(name, type)                                                                            \
    static void name(const uint8_t *restrict bits, const type *restrict dense, Py_ssize_t known,       \
                     Py_ssize_t n, type *restrict words) {                                             \
        Py_ssize_t taken = 0;                                                                          \
        for (Py_ssize_t i = 0; i < n; i++) {                                                           \
            type kept = bits[i / 8] >> (i % 8) & 1;                                                    \
            /* At the end there may be no word left to look at. */                                     \
            words[i] = dense[taken < known ? taken : known - 1] & (type)(0 - kept);                    \
            taken += (Py_ssize_t)kept;                                                                 \
        }                                                                                              \
    }

GATHER(gather4, uint32_t)
GATHER(gather8, uint64_t)
SCATTER(scatter4, uint32_t)
SCATTER(scatter8, uint64_t)

/* gather(words, bits, dense, width): return how many words are not zero. */
static PyObject *gather(PyObject *self, PyObject *args) {
    Buffers b;
    long width = PyLong_AsLong(PyTuple_GetItem(args, 3));
    if (PyErr_Occurred() || take(&b, args, 3, 6) < 0) return NULL;
    Py_ssize_t n = width == 4 || width == 8 ? b.view[0].len / width : -1, kept;
    if (n < 0 || b.view[1].len != (n + 7) / 8 || b.view[2].len < b.view[0].len)
        return refuse(&b, "gather: sizes do not fit");
    if ((uintptr_t)b.view[0].buf % (size_t)width || (uintptr_t)b.view[2].buf % (size_t)width)
        return refuse(&b, "gather: not aligned");
    Py_BEGIN_ALLOW_THREADS
    kept = width == 4 ? gather4(b.view[0].buf, n, b.view[1].buf, b.view[2].buf)
                      : gather8(b.view[0].buf, n, b.view[1].buf, b.view[2].buf);
    Py_END_ALLOW_THREADS
    return finish(&b, kept);
}

/* scatter(bits, dense, words, width): undo gather; the bits have to say as many as there are, at least one. */
static PyObject *scatter(PyObject *self, PyObject *args) {
    Buffers b;
    long width = PyLong_AsLong(PyTuple_GetItem(args, 3));
    if (PyErr_Occurred() || take(&b, args, 3, 4) < 0) return NULL;
    Py_ssize_t n = width == 4 || width == 8 ? b.view[2].len / width : -1;
    if (n < 0 || b.view[0].len != (n + 7) / 8 || b.view[1].len < width)
        return refuse(&b, "scatter: sizes do not fit");
    if ((uintptr_t)b.view[1].buf % (size_t)width || (uintptr_t)b.view[2].buf % (size_t)width)
        return refuse(&b, "scatter: not aligned");
    Py_BEGIN_ALLOW_THREADS
    if (width == 4)
        scatter4(b.view[0].buf, b.view[1].buf, b.view[1].len / width, n, b.view[2].buf);
    else
        scatter8(b.view[0].buf, b.view[1].buf, b.view[1].len / width, n, b.view[2].buf);
    Py_END_ALLOW_THREADS
    return finish(&b, n);
}

#define HALVES(name, type)                                                                             \
    VECTORIZED static void name(const type *restrict words, Py_ssize_t n, type addend, int shift,      \
                                uint16_t carry, uint8_t *restrict low, uint8_t *restrict high) {       \
        for (Py_ssize_t i = 0; i < n; i++) {                                                           \
            uint16_t pair = (uint16_t)((type)(words[i] + addend) >> shift);                            \
            low[i] = (uint8_t)pair;                                                                    \
            high[i] = (uint8_t)((uint16_t)(pair + carry) >> 8);                                        \
        }                                                                                              \
    }

HALVES(halves2, uint16_t)
HALVES(halves4, uint32_t)
HALVES(halves8, uint64_t)

/* halves(words, low, high, addend, shift, carry): both bytes of the digit of 16 bits that a shift leaves. */
static PyObject *halves(PyObject *self, PyObject *args) {
    Buffers b;
    unsigned long long addend = PyLong_AsUnsignedLongLong(PyTuple_GetItem(args, 3));
    if (PyErr_Occurred()) return NULL;
    long shift = PyLong_AsLong(PyTuple_GetItem(args, 4)), carry = PyLong_AsLong(PyTuple_GetItem(args, 5));
    if (PyErr_Occurred() || take(&b, args, 3, 6) < 0) return NULL;
    Py_ssize_t n = b.view[1].len, width = n ? b.view[0].len / n : 2;
    if (b.view[0].len != n * width || b.view[2].len != n || (width != 2 && width != 4 && width != 8) ||
        shift < 0 || shift >= 8 * width)
        return refuse(&b, "halves: sizes do not fit");
    if ((uintptr_t)b.view[0].buf % (size_t)width) return refuse(&b, "halves: not aligned");
    const void *words = b.view[0].buf;
    uint8_t *low = b.view[1].buf, *high = b.view[2].buf;
    Py_BEGIN_ALLOW_THREADS
    if (width == 2)
        halves2(words, n, (uint16_t)addend, (int)shift, (uint16_t)carry, low, high);
    else if (width == 4)
        halves4(words, n, (uint32_t)addend, (int)shift, (uint16_t)carry, low, high);
    else
        halves8(words, n, addend, (int)shift, (uint16_t)carry, low, high);
    Py_END_ALLOW_THREADS
    return finish(&b, n);
}

static PyMethodDef METHODS[] = {
    {"split", split, METH_VARARGS, NULL},
    {"join", join, METH_VARARGS, NULL},
    {"references", references, METH_VARARGS, NULL},
    {"pack", pack, METH_VARARGS, NULL},
    {"unpack", unpack, METH_VARARGS, NULL},
    {"list_filled", list_filled, METH_VARARGS, NULL},
    {"halves", halves, METH_VARARGS, NULL},
    {"gather", gather, METH_VARARGS, NULL},
    {"scatter", scatter, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_kernels", NULL, 0, METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModuleDef_Init(&MODULE); }
