// CRC-32C: by carry-less products of wide vectors, else by the CPU's instruction, else by tables.
#include "checksum.h"

#include <array>
#include <cstring>

#include "dispatch.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define TIDEGATE_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#define TIDEGATE_CRC_TARGET __attribute__((target("+crc")))
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read in little-endian order");

namespace tidegate {
namespace {

// Polynomials over GF(2) with the lowest power in the highest bit: 1 is 1 << 31, x is 1 << 30.
constexpr uint32_t kPolynomial = 0x82f63b78;

constexpr uint32_t times_x(uint32_t value) { return value & 1 ? (value >> 1) ^ kPolynomial : value >> 1; }

constexpr uint32_t product(uint32_t a, uint32_t b) {
  uint32_t sum = 0;
  for (uint32_t power = 1u << 31; power != 0; power >>= 1, b = times_x(b))
    if (a & power) sum ^= b;
  return sum;
}

constexpr uint32_t power_of_x(size_t exponent) {
  uint32_t result = 1u << 31;
  for (uint32_t square = 1u << 30; exponent != 0; exponent >>= 1, square = product(square, square))
    if (exponent & 1) result = product(result, square);
  return result;
}

template <size_t Tables>
using ByteTables = std::array<std::array<uint32_t, 256>, Tables>;

// [k][byte]: what a byte adds to the checksum that stands k bytes further on.
constexpr ByteTables<8> make_slices() {
  ByteTables<8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) tables[0][byte] = product(byte, power_of_x(8));
  for (size_t k = 1; k < 8; ++k)
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 255];
    }
  return tables;
}

constexpr ByteTables<8> kSlices = make_slices();

uint64_t word_at(const unsigned char* place) {
  uint64_t word;
  std::memcpy(&word, place, sizeof word);
  return word;
}

#if defined(TIDEGATE_CRC_TARGET)

// The instruction has a latency of three and takes one word a cycle, so three streams run at once. Long streams for
// blocks of storage, short ones for what is left of them.
constexpr size_t kLongStream = 4096, kShortStream = 256, kCacheLine = 64;

// [k][byte]: byte k of a checksum after `nbytes` of zeros.
constexpr ByteTables<4> make_shift(size_t nbytes) {
  ByteTables<4> tables{};
  const uint32_t factor = power_of_x(8 * nbytes);
  for (size_t k = 0; k < 4; ++k)
    for (uint32_t byte = 0; byte < 256; ++byte) tables[k][byte] = product(factor, byte << (8 * k));
  return tables;
}

template <size_t Bytes>
uint32_t shifted(uint32_t crc) {
  static constexpr ByteTables<4> tables = make_shift(Bytes);
  return tables[0][crc & 255] ^ tables[1][crc >> 8 & 255] ^ tables[2][crc >> 16 & 255] ^ tables[3][crc >> 24];
}

#if defined(__x86_64__)
TIDEGATE_CRC_TARGET inline uint64_t with_word(uint64_t crc, uint64_t word) { return _mm_crc32_u64(crc, word); }
TIDEGATE_CRC_TARGET inline uint32_t with_byte(uint32_t crc, unsigned char byte) { return _mm_crc32_u8(crc, byte); }
bool has_instruction() { return __builtin_cpu_supports("sse4.2"); }
#else
TIDEGATE_CRC_TARGET inline uint64_t with_word(uint64_t crc, uint64_t word) { return __crc32cd(uint32_t(crc), word); }
TIDEGATE_CRC_TARGET inline uint32_t with_byte(uint32_t crc, unsigned char byte) { return __crc32cb(crc, byte); }
bool has_instruction() { return getauxval(AT_HWCAP) & HWCAP_CRC32; }
#endif

// Takes triples of streams of `Bytes` each while there are any.
template <size_t Bytes>
TIDEGATE_CRC_TARGET uint32_t take_triples(uint32_t crc, const unsigned char*& place, size_t& left) {
  for (; left >= 3 * Bytes; place += 3 * Bytes, left -= 3 * Bytes) {
    uint64_t first = crc, second = 0, third = 0;
    for (const unsigned char *p = place, *end = place + Bytes; p != end; p += kCacheLine) {
      // The same line of the next triple's streams. Streams end with their page, and so does what the CPU fetches
      // ahead by itself: without this, memory that is in no cache takes a third longer. Past the end it does nothing.
      for (size_t stream = 3; stream < 6; ++stream) __builtin_prefetch(p + stream * Bytes);
      for (size_t at = 0; at < kCacheLine; at += 8) {
        first = with_word(first, word_at(p + at));
        second = with_word(second, word_at(p + at + Bytes));
        third = with_word(third, word_at(p + at + 2 * Bytes));
      }
    }
    crc = shifted<Bytes>(shifted<Bytes>(uint32_t(first)) ^ uint32_t(second)) ^ uint32_t(third);
  }
  return crc;
}

TIDEGATE_CRC_TARGET uint32_t crc32c_by_instruction(const void* data, size_t nbytes, uint32_t seed) {
  const auto* place = static_cast<const unsigned char*>(data);
  uint32_t crc = ~seed;
  crc = take_triples<kLongStream>(crc, place, nbytes);
  crc = take_triples<kShortStream>(crc, place, nbytes);
  for (; nbytes >= 8; place += 8, nbytes -= 8) crc = uint32_t(with_word(crc, word_at(place)));
  for (; nbytes > 0; ++place, --nbytes) crc = with_byte(crc, *place);
  return ~crc;
}

#if defined(TIDEGATE_HAS_X86_LEVELS)

#define TIDEGATE_FOLD_TARGET __attribute__((target("avx512f,vpclmulqdq,sse4.2")))

// Bytes that are folded at once, in vectors that do not wait for each other; and the fewest for which that pays.
constexpr size_t kVector = 64, kFolded = 4 * kVector, kShortestFold = 4 * kFolded;

// What a word is multiplied by to move it on by `bits`. One power less: the product of two words whose lowest power is
// in the highest bit comes out one power too high.
constexpr int64_t fold_factor(size_t bits) { return int64_t(uint64_t(power_of_x(bits - 1)) << 32); }

// Moves bytes on by kFolded and adds them to those that stand there, until kFolded are left, with the checksum of all.
// Memory is fetched ahead by the CPU itself: there is one stream.
TIDEGATE_FOLD_TARGET uint32_t crc32c_by_folds(const void* data, size_t nbytes, uint32_t seed) {
  if (nbytes < kShortestFold) return crc32c_by_instruction(data, nbytes, seed);
  const auto* place = static_cast<const unsigned char*>(data);
  constexpr int64_t second = fold_factor(8 * kFolded), first = fold_factor(8 * kFolded + 64);
  const __m512i factors = _mm512_set4_epi64(second, first, second, first);
  __m512i sums[kFolded / kVector];
  for (size_t k = 0; k < kFolded / kVector; ++k) sums[k] = _mm512_loadu_si512(place + k * kVector);
  sums[0] = _mm512_xor_si512(sums[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(int(~seed))));
  for (place += kFolded, nbytes -= kFolded; nbytes >= kFolded; place += kFolded, nbytes -= kFolded)
    for (size_t k = 0; k < kFolded / kVector; ++k)
      sums[k] = _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(sums[k], factors, 0x00),
                                          _mm512_clmulepi64_epi128(sums[k], factors, 0x11),
                                          _mm512_loadu_si512(place + k * kVector), 0x96);  // a ^ b ^ c
  return crc32c_by_instruction(place, nbytes, crc32c_by_instruction(sums, sizeof sums, ~0u));
}

#endif
#endif

}  // namespace

Crc32cShift::Crc32cShift(size_t nbytes) : nbytes_(nbytes), factor_(power_of_x(8 * nbytes)) {}

uint32_t Crc32cShift::operator()(uint32_t checksum) const { return product(factor_, checksum); }

uint32_t crc32c_by_tables(const void* data, size_t nbytes, uint32_t seed) {
  const auto* place = static_cast<const unsigned char*>(data);
  uint32_t crc = ~seed;
  for (; nbytes >= 8; place += 8, nbytes -= 8) {
    const uint64_t word = word_at(place) ^ crc;
    crc = 0;
    for (size_t k = 0; k < 8; ++k) crc ^= kSlices[7 - k][word >> (8 * k) & 255];
  }
  for (; nbytes > 0; ++place, --nbytes) crc = (crc >> 8) ^ kSlices[0][(crc ^ *place) & 255];
  return ~crc;
}

uint32_t crc32c(const void* data, size_t nbytes, uint32_t seed) {
#if defined(TIDEGATE_CRC_TARGET)
  static const bool hardware = has_instruction();
#if defined(TIDEGATE_HAS_X86_LEVELS)
  static const bool folds = __builtin_cpu_supports("vpclmulqdq");
  if (folds && current_isa() == Isa::Avx512) return crc32c_by_folds(data, nbytes, seed);
#endif
  const bool below_the_widest = current_isa() == Isa::Baseline && widest_isa() != Isa::Baseline;
  if (hardware && !below_the_widest) return crc32c_by_instruction(data, nbytes, seed);
#endif
  return crc32c_by_tables(data, nbytes, seed);
}

}  // namespace tidegate
