// A device of Paddle's custom kind that computes on the CPU, for tests of the accelerator's path.
//
// Paddle loads it from CUSTOM_DEVICE_ROOT and calls it `custom_cpu`.  Memory, streams and copies are
// those of the host; every operator falls back to Paddle's CPU kernel, but for the few below that
// Paddle asks the device for.  Collectives go through shared memory, every rank adding in the order
// of ranks, so that all hold the same bits.  What Paddle asked for is counted: `custom_cpu_count`.

#include <fcntl.h>
#include <malloc.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "paddle/phi/backends/device_ext.h"
#include "paddle/phi/capi/all.h"

namespace {

constexpr size_t kTotalBytes = size_t{64} << 30;
constexpr int kPatienceSeconds = 120;

std::map<std::string, std::atomic<long>> counts = [] {
  std::map<std::string, std::atomic<long>> made;
  for (auto name : {"copies to the device", "copies to the host", "later to the device", "later to the host", "communicators", "all_reduce",
                    "broadcast", "all_gather", "reduce_scatter", "send", "allocated bytes"})
    made[name] = 0;
  return made;
}();

bool without_code = false;  // all that is computed is 0

// Device and memory

std::atomic<int> current{0};

C_Status nothing() { return C_SUCCESS; }
C_Status nothing_to(const C_Device) { return C_SUCCESS; }

C_Status set_device(const C_Device device) {
  current = device->id;
  return C_SUCCESS;
}

C_Status get_device(const C_Device device) {
  device->id = current;
  return C_SUCCESS;
}

int cards() {
  const char* said = std::getenv("CUSTOM_CPU_CARDS");
  return said ? std::max(1, std::atoi(said)) : 2;
}

C_Status device_count(size_t* count) {
  *count = cards();
  return C_SUCCESS;
}

C_Status device_list(size_t* devices) {
  for (int each = 0; each < cards(); ++each) devices[each] = each;
  return C_SUCCESS;
}

C_Status create_stream(const C_Device, C_Stream* stream) {
  static std::atomic<intptr_t> made{0};
  *stream = reinterpret_cast<C_Stream>(++made);  // a name: without one Paddle copies synchronously
  return C_SUCCESS;
}

C_Status on_stream(const C_Device, C_Stream) { return C_SUCCESS; }

C_Status call_back(const C_Device device, C_Stream stream, C_Callback callback, void* data) {
  C_Status status = C_SUCCESS;
  callback(device, stream, data, &status);
  return status;
}

C_Status create_event(const C_Device, C_Event* event) {
  *event = nullptr;
  return C_SUCCESS;
}

C_Status on_event(const C_Device, C_Event) { return C_SUCCESS; }
C_Status on_both(const C_Device, C_Stream, C_Event) { return C_SUCCESS; }

C_Status allocate(const C_Device, void** ptr, size_t size) {
  *ptr = std::aligned_alloc(64, (size + 63) / 64 * 64);
  if (!*ptr) return C_FAILED;
  counts["allocated bytes"] += size;
  return C_SUCCESS;
}

C_Status deallocate(const C_Device, void* ptr, size_t size) {
  std::free(ptr);
  counts["allocated bytes"] -= size;
  return C_SUCCESS;
}

C_Status fill_bytes(const C_Device, void* ptr, unsigned char value, size_t size) {
  std::memset(ptr, value, size);
  return C_SUCCESS;
}

C_Status copy(const C_Device, void* dst, const void* src, size_t size) {
  std::memcpy(dst, src, size);
  return C_SUCCESS;
}

C_Status copy_in(const C_Device device, void* dst, const void* src, size_t size) {
  ++counts["copies to the device"];
  return without_code ? fill_bytes(device, dst, 0, size) : copy(device, dst, src, size);
}

C_Status copy_out(const C_Device device, void* dst, const void* src, size_t size) {
  ++counts["copies to the host"];
  return copy(device, dst, src, size);
}

C_Status copy_in_later(const C_Device device, C_Stream, void* dst, const void* src, size_t size) {
  ++counts["later to the device"];
  return without_code ? fill_bytes(device, dst, 0, size) : copy(device, dst, src, size);
}

C_Status copy_out_later(const C_Device device, C_Stream, void* dst, const void* src, size_t size) {
  ++counts["later to the host"];
  return copy(device, dst, src, size);
}

C_Status copy_later(const C_Device device, C_Stream, void* dst, const void* src, size_t size) {
  return copy(device, dst, src, size);
}

C_Status memory_stats(const C_Device, size_t* total, size_t* left) {
  *total = kTotalBytes;
  *left = kTotalBytes - std::min<size_t>(kTotalBytes, counts["allocated bytes"]);
  return C_SUCCESS;
}

C_Status chunk_size(const C_Device, size_t* size) {
  *size = 64;
  return C_SUCCESS;
}

C_Status version(const C_Device, size_t* number) {
  *number = 1;
  return C_SUCCESS;
}

// Collectives over shared memory

constexpr size_t kSlotBytes = size_t{4} << 20;

struct Shared {
  std::atomic<int> arrived, round;
};

struct Communicator {
  int rank, ranks;
  Shared* shared;
  char* slots;

  char* slot(int of) const { return slots + of * kSlotBytes; }

  void barrier(const char* what) const {
    int round = shared->round;
    if (shared->arrived.fetch_add(1) + 1 == ranks) {
      shared->arrived = 0;
      ++shared->round;
      syscall(SYS_futex, &shared->round, FUTEX_WAKE, ranks, nullptr, nullptr, 0);
      return;
    }
    for (int second = 0; shared->round == round; ++second) {
      if (second == kPatienceSeconds) {
        std::fprintf(stderr, "custom_cpu: rank %d waited for another in %s\n", rank, what);
        std::abort();
      }
      timespec patience{1, 0};
      syscall(SYS_futex, &shared->round, FUTEX_WAIT, round, &patience, nullptr, 0);
    }
  }

  // Each rank shows `count` bytes of its own at a time; `take` reads those of all.
  template <typename Take>
  void exchange(const char* what, const void* own, size_t bytes, Take take) const {
    for (size_t at = 0; at < bytes || at == 0; at += kSlotBytes) {
      size_t part = std::min(kSlotBytes, bytes - at);
      if (own) std::memcpy(slot(rank), static_cast<const char*>(own) + at, part);
      barrier(what);
      take(at, part);
      barrier(what);
    }
  }
};

size_t size_of(C_DataType type) {
  switch (type) {
    case C_DataType::FLOAT64: case C_DataType::INT64: case C_DataType::UINT64: return 8;
    case C_DataType::FLOAT32: case C_DataType::INT32: case C_DataType::UINT32: return 4;
    case C_DataType::FLOAT16: case C_DataType::BFLOAT16: case C_DataType::INT16: return 2;
    default: return 1;
  }
}

float wide(uint16_t bits) {
  uint32_t whole = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &whole, 4);
  return value;
}

uint16_t narrow(float value) {  // to the nearest, to even
  uint32_t whole;
  std::memcpy(&whole, &value, 4);
  if (value != value) return static_cast<uint16_t>(whole >> 16 | 0x40);
  return static_cast<uint16_t>((whole + 0x7fff + (whole >> 16 & 1)) >> 16);
}

template <typename T>
T reduced(T first, T second, C_CCLReduceOp op) {
  switch (op) {
    case MAX: return std::max(first, second);
    case MIN: return std::min(first, second);
    case PRODUCT: return first * second;
    default: return first + second;
  }
}

template <typename T>
void reduce_slots(const Communicator& comm, void* into, size_t bytes, C_CCLReduceOp op) {
  T* out = static_cast<T*>(into);
  std::memcpy(out, comm.slot(0), bytes);
  for (int rank = 1; rank < comm.ranks; ++rank) {
    const T* other = reinterpret_cast<const T*>(comm.slot(rank));
    for (size_t at = 0; at < bytes / sizeof(T); ++at) out[at] = reduced(out[at], other[at], op);
  }
}

void reduce_bfloat16(const Communicator& comm, void* into, size_t bytes, C_CCLReduceOp op) {
  auto* out = static_cast<uint16_t*>(into);
  for (size_t at = 0; at < bytes / 2; ++at) {
    float value = wide(reinterpret_cast<const uint16_t*>(comm.slot(0))[at]);
    for (int rank = 1; rank < comm.ranks; ++rank) {
      float other = wide(reinterpret_cast<const uint16_t*>(comm.slot(rank))[at]);
      value = wide(narrow(reduced(value, other, op)));
    }
    out[at] = narrow(value);
  }
}

C_Status reduce(const Communicator& comm, void* into, size_t bytes, C_DataType type,
                C_CCLReduceOp op) {
  switch (type) {
    case C_DataType::FLOAT32: reduce_slots<float>(comm, into, bytes, op); break;
    case C_DataType::FLOAT64: reduce_slots<double>(comm, into, bytes, op); break;
    case C_DataType::INT32: reduce_slots<int32_t>(comm, into, bytes, op); break;
    case C_DataType::INT64: reduce_slots<int64_t>(comm, into, bytes, op); break;
    case C_DataType::BFLOAT16: reduce_bfloat16(comm, into, bytes, op); break;
    case C_DataType::FLOAT16: reduce_slots<_Float16>(comm, into, bytes, op); break;
    case C_DataType::UINT8: case C_DataType::BOOL:
      reduce_slots<uint8_t>(comm, into, bytes, op); break;
    default: return C_ERROR;
  }
  return op == AVG ? C_ERROR : C_SUCCESS;
}

Communicator& of(C_CCLComm comm) { return *reinterpret_cast<Communicator*>(comm); }

C_Status unique_id_size(size_t* size) {
  *size = 64;
  return C_SUCCESS;
}

C_Status unique_id(C_CCLRootId* id) {
  static std::atomic<int> made{0};
  id->sz = 64;
  std::memset(id->data, 0, id->sz);
  auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  std::snprintf(static_cast<char*>(id->data), id->sz, "/custom_cpu.%d.%d.%llx", getpid(), made++,
                static_cast<unsigned long long>(now));
  return C_SUCCESS;
}

C_Status join(size_t ranks, C_CCLRootId* id, size_t rank, C_CCLComm* comm) {
  const char* name = static_cast<const char*>(id->data);
  size_t bytes = sizeof(Shared) + 64 + ranks * kSlotBytes;
  int file = shm_open(name, O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, bytes) != 0) return C_FAILED;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return C_FAILED;
  auto* made = new Communicator{static_cast<int>(rank), static_cast<int>(ranks),
                                static_cast<Shared*>(memory),
                                static_cast<char*>(memory) + (sizeof(Shared) + 63) / 64 * 64};
  made->barrier("joining");
  if (rank == 0) shm_unlink(name);
  ++counts["communicators"];
  *comm = reinterpret_cast<C_CCLComm>(made);
  return C_SUCCESS;
}

C_Status leave(C_CCLComm comm) {
  delete &of(comm);  // its memory goes with the process: another rank may still read it
  return C_SUCCESS;
}

C_Status comm_name(C_CCLComm, char* name) {
  std::strcpy(name, "custom_cpu");
  return C_SUCCESS;
}

C_Status all_reduce(void* send, void* receive, size_t count, C_DataType type, C_CCLReduceOp op,
                    C_CCLComm comm, C_Stream) {
  ++counts["all_reduce"];
  C_Status status = C_SUCCESS;
  of(comm).exchange("all_reduce", send, count * size_of(type), [&](size_t at, size_t part) {
    status = reduce(of(comm), static_cast<char*>(receive) + at, part, type, op);
  });
  return status;
}

C_Status reduce_to(void* send, void* receive, size_t count, C_DataType type, C_CCLReduceOp op,
                   size_t root, C_CCLComm comm, C_Stream) {
  C_Status status = C_SUCCESS;
  of(comm).exchange("reduce", send, count * size_of(type), [&](size_t at, size_t part) {
    if (of(comm).rank == static_cast<int>(root))
      status = reduce(of(comm), static_cast<char*>(receive) + at, part, type, op);
  });
  return status;
}

C_Status broadcast(void* buffer, size_t count, C_DataType type, size_t root, C_CCLComm comm,
                   C_Stream) {
  ++counts["broadcast"];
  auto& own = of(comm);
  bool sends = own.rank == static_cast<int>(root);
  own.exchange("broadcast", sends ? buffer : nullptr, count * size_of(type),
               [&](size_t at, size_t part) {
                 if (!sends) std::memcpy(static_cast<char*>(buffer) + at, own.slot(root), part);
               });
  return C_SUCCESS;
}

C_Status all_gather(void* send, void* receive, size_t count, C_DataType type, C_CCLComm comm,
                    C_Stream) {
  ++counts["all_gather"];
  auto& own = of(comm);
  size_t bytes = count * size_of(type);
  own.exchange("all_gather", send, bytes, [&](size_t at, size_t part) {
    for (int rank = 0; rank < own.ranks; ++rank)
      std::memcpy(static_cast<char*>(receive) + rank * bytes + at, own.slot(rank), part);
  });
  return C_SUCCESS;
}

C_Status reduce_scatter(void* send, void* receive, size_t count, C_DataType type, C_CCLReduceOp op,
                        C_CCLComm comm, C_Stream stream) {
  ++counts["reduce_scatter"];
  size_t bytes = count * size_of(type);  // of one rank
  std::vector<char> whole(bytes * of(comm).ranks);
  C_Status status =
      all_reduce(send, whole.data(), count * of(comm).ranks, type, op, comm, stream);
  std::memcpy(receive, whole.data() + of(comm).rank * bytes, bytes);
  return status;
}

// Of a group of two, which is the only one whose ranks send to each other.

C_Status send_to(void* buffer, size_t count, C_DataType type, size_t, C_CCLComm comm, C_Stream) {
  ++counts["send"];
  if (of(comm).ranks != 2) return C_ERROR;
  of(comm).exchange("send", buffer, count * size_of(type), [](size_t, size_t) {});
  return C_SUCCESS;
}

C_Status receive_from(void* buffer, size_t count, C_DataType type, size_t source, C_CCLComm comm,
                      C_Stream) {
  if (of(comm).ranks != 2) return C_ERROR;
  of(comm).exchange("receive", nullptr, count * size_of(type), [&](size_t at, size_t part) {
    std::memcpy(static_cast<char*>(buffer) + at, of(comm).slot(source), part);
  });
  return C_SUCCESS;
}

// Kernels that Paddle asks the device for

// Calls `visit` with the place of each entry, in their order, of a tensor with such strides.
template <typename Visit>
void for_each_place(const std::vector<int64_t>& dims, const std::vector<int64_t>& strides,
                    Visit visit) {
  int64_t count = 1;
  for (int64_t dim : dims) count *= dim;
  std::vector<int64_t> index(dims.size(), 0);
  int64_t place = 0;
  for (int64_t at = 0; at < count; ++at) {
    visit(at, place);
    for (int axis = static_cast<int>(dims.size()) - 1; axis >= 0; --axis) {
      place += strides[axis];
      if (++index[axis] < dims[axis]) break;
      place -= index[axis] * strides[axis];
      index[axis] = 0;
    }
  }
}

template <typename T>
void contiguous(const phi::Context& context, const phi::DenseTensor& input,
                phi::DenseTensor* out) {
  std::vector<int64_t> dims = input.dims(), dense(dims.size(), 1);
  for (int axis = static_cast<int>(dims.size()) - 2; axis >= 0; --axis)
    dense[axis] = dense[axis + 1] * dims[axis + 1];
  std::vector<int64_t> strides = input.strides();
  out->Resize(dims);
  out->set_strides(dense);
  const T* from = input.data<T>();
  T* to = context.template Alloc<T>(out);
  for_each_place(dims, strides, [&](int64_t at, int64_t place) { to[at] = from[place]; });
}

template <typename T>
void strided_copy(const phi::Context&, const phi::DenseTensor& input,
                  const std::vector<int64_t>& dims, const std::vector<int64_t>& out_strides,
                  int64_t offset, phi::DenseTensor* out) {
  out->Resize(dims);
  out->set_strides(out_strides);
  out->set_offset(offset);
  T* to = const_cast<T*>(static_cast<const phi::DenseTensor*>(out)->data<T>());
  const T* from = input.data<T>();
  std::vector<int64_t> places(input.numel());
  for_each_place(input.dims(), input.strides(),
                 [&](int64_t at, int64_t place) { places[at] = place; });
  for_each_place(dims, out_strides,
                 [&](int64_t at, int64_t place) { to[place] = from[places[at]]; });
}

template <typename T>
void fill(const phi::Context& context, const phi::DenseTensor&, const phi::Scalar& value,
          phi::DenseTensor* out) {
  T* to = context.template Alloc<T>(out);
  std::fill_n(to, out->numel(), static_cast<T>(value.to<float>()));
}

template <typename T>
void copy_tensor(const phi::Context& context, const phi::DenseTensor& input, int,
                 phi::DenseTensor* out) {
  out->Resize(input.dims());
  T* to = context.template Alloc<T>(out);
  std::memcpy(to, input.data<T>(), input.memory_size());
}

}  // namespace

extern "C" long custom_cpu_count(const char* what) {
  auto found = counts.find(what);
  return found == counts.end() ? -1 : found->second.load();
}

extern "C" void custom_cpu_without_code(bool is) { without_code = is; }

extern "C" void InitPlugin(CustomRuntimeParams* params) {
  // What a step frees the next one takes: else the kernel maps the same pages anew for each tensor.
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, -1);
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  params->device_type = const_cast<char*>("custom_cpu");
  params->sub_device_type = const_cast<char*>("tests");
  C_DeviceInterface& device = *params->interface;
  std::memset(static_cast<void*>(&device), 0, sizeof(C_DeviceInterface));
  device.size = sizeof(C_DeviceInterface);
  device.initialize = nothing;
  device.finalize = nothing;
  device.init_device = nothing_to;
  device.set_device = set_device;
  device.get_device = get_device;
  device.deinit_device = nothing_to;
  device.create_stream = create_stream;
  device.destroy_stream = on_stream;
  device.query_stream = on_stream;
  device.stream_add_callback = call_back;
  device.create_event = create_event;
  device.record_event = on_both;
  device.destroy_event = on_event;
  device.query_event = on_event;
  device.synchronize_device = nothing_to;
  device.synchronize_stream = on_stream;
  device.synchronize_event = on_event;
  device.stream_wait_event = on_both;
  device.device_memory_allocate = allocate;
  device.device_memory_deallocate = deallocate;
  device.host_memory_allocate = allocate;
  device.host_memory_deallocate = deallocate;
  device.unified_memory_allocate = allocate;
  device.unified_memory_deallocate = deallocate;
  device.device_memory_set = fill_bytes;
  device.memory_copy_h2d = copy_in;
  device.memory_copy_d2h = copy_out;
  device.memory_copy_d2d = copy;
  device.async_memory_copy_h2d = copy_in_later;
  device.async_memory_copy_d2h = copy_out_later;
  device.async_memory_copy_d2d = copy_later;
  device.get_device_count = device_count;
  device.get_device_list = device_list;
  device.device_memory_stats = memory_stats;
  device.device_min_chunk_size = chunk_size;
  device.get_compute_capability = version;
  device.get_runtime_version = version;
  device.get_driver_version = version;
  device.xccl_get_comm_name = comm_name;
  device.xccl_get_unique_id_size = unique_id_size;
  device.xccl_get_unique_id = unique_id;
  device.xccl_comm_init_rank = join;
  device.xccl_destroy_comm = leave;
  device.xccl_all_reduce = all_reduce;
  device.xccl_broadcast = broadcast;
  device.xccl_reduce = reduce_to;
  device.xccl_all_gather = all_gather;
  device.xccl_reduce_scatter = reduce_scatter;
  device.xccl_group_start = nothing;
  device.xccl_group_end = nothing;
  device.xccl_send = send_to;
  device.xccl_recv = receive_from;
}

#define FOR_ALL(name, kernel, ...)                                                         \
  PD_BUILD_PHI_KERNEL(name, custom_cpu, ALL_LAYOUT, kernel, float, double, int32_t, int64_t, \
                      int16_t, uint8_t, int8_t, bool, phi::dtype::float16,                 \
                      phi::dtype::bfloat16) {}

FOR_ALL(contiguous, contiguous)
FOR_ALL(strided_copy, strided_copy)
FOR_ALL(fill, fill)
FOR_ALL(memcpy, copy_tensor)
