#define SOCFLOWER_INT8_NAMESPACE avx_vnni
#include "loops.inc"
#include "block_avx_vnni.h"

namespace socflower::int8 {

extern const Path kAvxVnniPath;
const Path kAvxVnniPath =
    avx_vnni::make_path("avx-vnni", avx_vnni::kGeneral, avx_vnni::kActivations, avx_vnni::kWide);

}  // namespace socflower::int8
