#define SOCFLOWER_INT8_NAMESPACE avx512_vnni
#include "loops.inc"
#include "block_avx512_vnni.h"

namespace socflower::int8 {

extern const Path kAvx512VnniPath;
const Path kAvx512VnniPath =
    avx512_vnni::make_path("avx512-vnni", avx512_vnni::kGeneral, avx512_vnni::kActivations, avx512_vnni::kWide);

}  // namespace socflower::int8
